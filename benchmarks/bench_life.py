"""How near simulations are to life: real runs of vLLM, and closed loops of a real server.

``python benchmarks/bench_life.py CALIBRATION``, a folder with step tables (``steps-*.csv``), logs
of runs (``runs/*.csv.gz``) and measured serving points (``serving.csv``). Presets come from step
tables alone, or from the run's own log; where no table of several GPUs is known, also from what
that of one would be if they shared it and their exchange were free: a bound from below.
docs/simulate.md has the figures, and the sources.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli
from attrs import frozen

from dpkit.config.load import parse_config
from dpkit.simulate.fit_log import Served
from dpkit.simulate.measures import percentile
from dpkit.simulate.readings import read_measured
from dpkit.simulate.run import Scenario, run
from dpkit.simulate.settings import simulated
from dpkit.traces import Ask, Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    Figures = tuple[float, float, float, float]

HOST = ("--host-ms", "1.5")
KERNELS = ("a_ms", "b_us", "c_us", "d_ns", "q_ns", "a2_ms", "e_ms", "d2_ns")

Preset = Mapping[str, Any]


@frozen
class Real:
    """A run, and the table of the same model."""

    name: str
    table: str
    engines: int = 1
    fit_options: tuple[str, ...] = ()
    others: tuple[Other, ...] = ()


@frozen
class Other:
    """What the table may be made to say beside what it says."""

    name: str
    change: Callable[[Preset], Preset]
    in_lockstep: bool = False


def as_it_is(preset: Preset) -> Preset:
    return preset


def with_half_kernels(preset: Preset) -> Preset:
    """Two GPUs share every kernel, and what they tell each other takes no time."""
    return {**preset, **{key: preset[key] / 2 for key in KERNELS if key in preset}}


def with_shared_experts(preset: Preset) -> Preset:
    """Each of two has half of the experts, which serve the tokens of both; likewise."""
    halves = {key: preset[key] / 2 for key in ("e_ms", "a2_ms")}
    chosen, total = preset["experts"]
    return {**preset, **halves, "experts": [2 * chosen, total]}


RUNS = (
    Real("llama-3.1-8b-rtxpro6000", "llama-3.1-8b-rtxpro6000"),
    Real(
        "qwen3-32b-rtxpro6000-tp2",
        "qwen3-32b-rtxpro6000",
        others=(Other("half", with_half_kernels),),
    ),
    Real(
        "qwen3-30b-a3b-rtxpro6000-dp2",
        "qwen3-30b-a3b-rtxpro6000",
        engines=2,
        fit_options=("--experts", "8/128"),
        others=(
            Other("lockstep", as_it_is, in_lockstep=True),
            Other("shared", with_shared_experts, in_lockstep=True),
        ),
    ),
)


def main(folder: Path) -> None:
    for each in RUNS:
        log = folder / "runs" / f"{each.name}.csv.gz"
        real = real_figures(log)
        tell(each.name, "life", real, real)
        steps = fitted(folder / f"steps-{each.table}.csv", *HOST, *each.fit_options)
        of_log = fitted(log, "--engines", str(each.engines))
        tell(each.name, "steps", simulated_figures(log, steps, each.engines), real)
        tell(each.name, "log", simulated_figures(log, of_log, each.engines), real)
        for other in each.others:
            preset = other.change(steps)
            figures = simulated_figures(log, preset, each.engines, in_lockstep=other.in_lockstep)
            tell(each.name, other.name, figures, real)
    serving(folder / "serving.csv")


def tell(name: str, how: str, figures: Figures, real: Figures) -> None:
    ratios = "  ".join(f"{a:8.3f} ({a / b:4.2f})" for a, b in zip(figures, real, strict=True))
    print(f"{name:30} {how:8} TTFT mean, p99, TPOT mean, makespan, s: {ratios}")


def figures_of(ttfts: Sequence[float], tpots: Sequence[float], makespan: float) -> Figures:
    p99 = percentile(sorted(ttfts), 0.99)
    return statistics.fmean(ttfts), p99, statistics.fmean(tpots), makespan


def real_figures(log: Path) -> Figures:
    served = [each for each in read_measured(log) if isinstance(each, Served)]
    arrivals = [ask.arrival_s for ask in read_trace(log).asks]
    ttfts = [each.first_s - at for each, at in zip(served, arrivals, strict=True)]
    tpots = [(s.last_s - s.first_s) / (s.output_tokens - 1) for s in served if s.output_tokens > 1]
    return figures_of(ttfts, tpots, max(each.last_s for each in served))


def fitted(file: Path, *words: str) -> Preset:
    """What `dpkit fit` makes of a file."""
    command = [sys.executable, "-m", "dpkit", "fit", str(file), *words, "--kv-tokens", "550000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return tomli.loads(done.stdout)


def simulated_figures(
    log: Path, preset: Preset, engines: int, *, in_lockstep: bool = False
) -> Figures:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.writelines(f"{key} = {value!r}\n" for key, value in preset.items())
        file.flush()
        text = f'[[engines]]\nmodel = "cost:{file.name}"\ncount = {engines}\n'
        text += "scheduler = {max_num_seqs = 128, max_num_batched_tokens = 2048}\n"
        text += f"[coordinator]\nwave_coordination = {str(in_lockstep).lower()}\n"
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
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        print(f"left out: {Path(__file__).name} needs a folder of what was measured, as it says")
