"""How near simulations are to life: real runs of vLLM, and closed loops of a real server.

``python benchmarks/bench_life.py CALIBRATION``, a folder with step tables (``steps-*.csv``), logs
of runs (``runs/*.csv.gz``) and measured serving points (``serving.csv``). Presets come from step
tables alone, or from the run's own log; docs/simulate.md has the figures, and the sources.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.config.load import parse_config
from dpkit.simulate.fit import Served
from dpkit.simulate.measures import percentile
from dpkit.simulate.readings import read_measured
from dpkit.simulate.run import Scenario, run
from dpkit.simulate.settings import simulated
from dpkit.traces import Ask, Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    Figures = tuple[float, float, float, float]

# The run, the table of the same model, its engines, and what `dpkit fit` must be told.
RUNS = (
    ("llama-3.1-8b-rtxpro6000", "llama-3.1-8b-rtxpro6000", 1, ()),
    ("qwen3-32b-rtxpro6000-tp2", "qwen3-32b-rtxpro6000", 1, ()),
    ("qwen3-30b-a3b-rtxpro6000-dp2", "qwen3-30b-a3b-rtxpro6000", 2, ("--experts", "8/128")),
)
HOST = ("--host-ms", "1.5")


def main(folder: Path) -> None:
    for name, table, engines, options in RUNS:
        log = folder / "runs" / f"{name}.csv.gz"
        real = real_figures(log)
        tell(name, "life", real, real)
        steps = folder / f"steps-{table}.csv"
        for how, words in (
            ("steps", [str(steps), *HOST, *options]),
            ("log", [str(log), "--engines", str(engines)]),
        ):
            tell(name, how, simulated_figures(log, words, engines), real)
    serving(folder / "serving.csv")


def tell(name: str, how: str, figures: Figures, real: Figures) -> None:
    ratios = "  ".join(f"{a:8.3f} ({a / b:4.2f})" for a, b in zip(figures, real, strict=True))
    print(f"{name:30} {how:6} TTFT mean, p99, TPOT mean, makespan, s: {ratios}")


def figures_of(ttfts: Sequence[float], tpots: Sequence[float], makespan: float) -> Figures:
    p99 = percentile(sorted(ttfts), 0.99)
    return statistics.fmean(ttfts), p99, statistics.fmean(tpots), makespan


def real_figures(log: Path) -> Figures:
    served = [each for each in read_measured(log) if isinstance(each, Served)]
    arrivals = [ask.arrival_s for ask in read_trace(log).asks]
    ttfts = [each.first_s - at for each, at in zip(served, arrivals, strict=True)]
    tpots = [(s.last_s - s.first_s) / (s.output_tokens - 1) for s in served if s.output_tokens > 1]
    return figures_of(ttfts, tpots, max(each.last_s for each in served))


def simulated_figures(log: Path, words: Sequence[str], engines: int) -> Figures:
    command = [sys.executable, "-m", "dpkit", "fit", *words, "--kv-tokens", "550000"]
    preset = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(preset)
        file.flush()
        text = f'[[engines]]\nmodel = "cost:{file.name}"\ncount = {engines}\n'
        text += "scheduler = {max_num_seqs = 128, max_num_batched_tokens = 2048}\n"
        outcome = run(Scenario(config=simulated(parse_config(text)), trace=read_trace(log)))
    ttfts = [answer.ttft_s for answer in outcome.answers]
    tpots = [answer.tpot_s for answer in outcome.answers if answer.tokens > 1]
    return figures_of(ttfts, tpots, outcome.duration_s)


def serving(points: Path) -> None:
    """TPOT of a closed loop: of the requests in its midst, which see others come and go."""
    config = simulated(parse_config('[[engines]]\nmodel = "cost:h100-8b"\n'))
    errors = []
    for row in csv.DictReader(points.open()):
        if (row["model"], row["gpu"], row["tp"]) != ("llama-3.1-8b", "h100", "1"):
            continue
        users = int(row["concurrency"])
        prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
        ask = Ask(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        trace = Trace(name="closed loop", asks=(ask,) * 4 * users, users=users)
        outcome = run(Scenario(config=config, trace=trace))
        middle = outcome.answers[users : 3 * users]
        tpot_ms = 1e3 * statistics.fmean(answer.tpot_s for answer in middle)
        errors.append(tpot_ms / float(row["tpot_ms"]) - 1)
    within = sum(abs(error) <= 0.1 for error in errors)
    mean = statistics.fmean(map(abs, errors))
    print(
        f"closed loops of h100-8b: TPOT within 10 % on {within} of {len(errors)}, {mean:.1%} mean"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
