"""Real weights: decode and prefill of the demo model against transformers and llama.cpp.

All on one thread, in CPU-seconds a token, the contenders taking turns. Ours is the whole engine:
schedule, lay out, compute, sample, apply. The peers only compute: transformers' forward with its
own growing cache, in the same dtype; llama.cpp's `llama-batched-bench`, which is a process of its
own, so that its cost is the difference of two runs of different length.

    python benchmarks/bench_torch.py [--dtype float32] [--rounds 5] [--llama BUILD/bin]

Needs `dpkit fetch smollm2-135m`; transformers is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import tempfile
import time
from importlib import util
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from harness import Rounds, compete, print_table

from dpkit.checkpoint import locate
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models.torch import load_torch_model
from dpkit.messages import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dpkit.engine.models.torch.model import TorchModel

MODEL = "smollm2-135m"
BATCHES = (1, 8, 32)
CONTEXT = 128
STEPS = 8  # decodes of one turn
PREFILL = 512
GGUF_TYPES = ("Q4_1", "Q4_0", "Q8_0")  # which is the best depends on the CPU and on the batch


def prompt(length: int, salt: int = 0) -> list[int]:
    """Made-up tokens; no two salts begin alike, so nothing is found in a cache."""
    return [100 + (salt * 7919 + i * 31) % 40_000 for i in range(length)]


class Decoding:
    """Requests that have their prompts behind them, and room to go on."""

    def __init__(self, model: TorchModel, batch: int, steps: int) -> None:
        steps += batch * CONTEXT // model.spec.max_num_batched_tokens  # the first begins before
        limits = resolve_limits(
            model.spec, num_blocks=batch * ((CONTEXT + steps) // 16 + 1), prefix_cache=False
        )
        self.core = EngineCore(model, limits=limits)
        self.cache = model.allocate(num_blocks=limits.num_blocks, block_size=16)
        self.batch = batch
        for number in range(batch):
            self.core.add(
                GenerateRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=tuple(prompt(CONTEXT, number)),
                    sampling=SamplingParams(max_tokens=steps, ignore_eos=True),
                )
            )
        while len(self.core.step(self.cache)) < batch:
            pass

    def __call__(self) -> float:
        """CPU-seconds a token of `STEPS` steps."""
        began = time.thread_time()
        for _ in range(STEPS):
            self.core.step(self.cache)
        return (time.thread_time() - began) / (STEPS * self.batch)


def prefill(model: TorchModel) -> Callable[[], float]:
    """A request of one output token, again and again."""
    limits = resolve_limits(
        model.spec, num_blocks=PREFILL // 16 + 1, max_num_batched_tokens=PREFILL, prefix_cache=False
    )
    core = EngineCore(model, limits=limits)
    cache = model.allocate(num_blocks=limits.num_blocks, block_size=16)

    def turn() -> float:
        core.add(
            GenerateRequest(
                request_id="r",
                prompt_token_ids=tuple(prompt(PREFILL)),
                sampling=SamplingParams(max_tokens=1),
            )
        )
        began = time.thread_time()
        while core.has_requests():
            core.step(cache)
        return (time.thread_time() - began) / PREFILL

    return turn


class Transformers:
    """The peer that computes in the same dtype."""

    def __init__(self, dtype: str) -> None:
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415 - only where it is installed

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._new_cache = transformers.DynamicCache
        forward = signature(transformers.LlamaForCausalLM.forward).parameters
        self._cache = "cache" if "cache" in forward else "past_key_values"  # renamed in 5.2x
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            locate(MODEL), dtype=getattr(torch, dtype)
        )

    def _forward(self, ids: Any, cache: Any) -> Any:
        with self._torch.inference_mode():
            made = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache: cache})
            return made.logits.argmax(-1)

    def decoding(self, batch: int) -> Callable[[], float]:
        """As `Decoding`."""
        cache = self._new_cache()
        ids = [prompt(CONTEXT, number) for number in range(batch)]
        tokens = self._forward(self._torch.tensor(ids), cache)

        def turn() -> float:
            nonlocal tokens
            began = time.thread_time()
            for _ in range(STEPS):
                tokens = self._forward(tokens, cache)
                tokens.tolist()
            return (time.thread_time() - began) / (STEPS * batch)

        return turn

    def prefill(self) -> float:
        """As `prefill`."""
        began = time.thread_time()
        self._forward(self._torch.tensor([prompt(PREFILL)]), self._new_cache()).tolist()
        return (time.thread_time() - began) / PREFILL


@frozen
class LlamaCpp:
    """The peer in C++: one of its own quantisations."""

    folder: Path
    file: Path

    def decoding(self, batch: int) -> Callable[[], float]:
        """As `Decoding`."""
        shape = ["-npp", str(CONTEXT), "-npl", str(batch)]
        more, fewer = 4 * STEPS + 1, 1

        def turn() -> float:
            cost = self._run(*shape, "-ntg", str(more)) - self._run(*shape, "-ntg", str(fewer))
            return cost / (batch * (more - fewer))

        return turn

    def prefill(self) -> float:
        """As `prefill`."""
        shape = ["-npp", str(PREFILL), "-ntg", "1", "-npl"]
        return (self._run(*shape, "4") - self._run(*shape, "1")) / (3 * PREFILL)

    def _run(self, *arguments: str) -> float:
        """CPU-seconds of one run."""
        command = [self.folder / "llama-batched-bench", "-m", self.file, *arguments]
        command += ["-c", "8192", "-b", "2048", "-ub", "512", "-t", "1", "-tb", "1"]
        before = _children()
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - the user's
        return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def llama_cpps(folder: Path, workshop: Path) -> dict[str, LlamaCpp]:
    """Its best for each thing differs by type, so all are tried."""
    source = next(locate(MODEL).glob("*.gguf"))
    found = {}
    for kind in GGUF_TYPES:
        file = source
        if kind != "Q4_1":
            file = workshop / f"{kind}.gguf"
            command = [folder / "llama-quantize", "--allow-requantize", source, file, kind]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - the user's
        found[f"llama.cpp {kind}"] = LlamaCpp(folder, file)
    return found


def report(title: str, rounds: Rounds, ours: Iterable[str]) -> None:
    """Ratios to transformers, and to the best that llama.cpp can do here."""
    peers = {"transformers": "transformers"} if "transformers" in rounds.costs else {}
    if types := [name for name in rounds.costs if name.startswith("llama.cpp")]:
        peers["best llama.cpp"] = min(types, key=rounds.median)
    print_table(
        title,
        ["", "tokens a CPU-second", *(f"times {peer}" for peer in peers)],
        [
            [name, f"{1 / rounds.median(name):,.0f}"]
            + [
                f"{rounds.times_faster(name, peer):.2f}" if name in ours else ""
                for peer in peers.values()
            ]
            for name in rounds.costs
        ],
    )


def stages(model: TorchModel, steps: int = 24) -> None:
    """Where a greedy step of the largest batch goes, CPU-milliseconds."""
    import torch  # noqa: PLC0415

    from dpkit.engine.models.torch.attention.base import CacheKind  # noqa: PLC0415
    from dpkit.engine.models.torch.batch import build_tensors  # noqa: PLC0415
    from dpkit.engine.models.torch.result import make_result  # noqa: PLC0415

    running = Decoding(model, BATCHES[-1], steps + STEPS)
    decoders = [model.tokenizer().decoder() for _ in range(running.batch)]
    times: dict[str, list[float]] = {}
    for _ in range(steps):
        marks = [("", time.thread_time())]
        if (batch := running.core.schedule()) is None:
            raise RuntimeError("nothing to do")
        marks.append(("schedule", time.thread_time()))
        step = build_tensors(batch, CacheKind.of(running.cache))
        marks.append(("build", time.thread_time()))
        with torch.inference_mode():
            scores = model._transformer(step, running.cache)  # noqa: SLF001 - to time it alone
            marks.append(("compute", time.thread_time()))
            result = make_result(batch, scores.to(torch.float32))
        marks.append(("sample", time.thread_time()))
        outputs = running.core.apply(batch, result)
        marks.append(("apply", time.thread_time()))
        for decoder, output in zip(decoders, outputs, strict=True):
            decoder.feed(output.token_ids)
        marks.append(("detokenise", time.thread_time()))
        for (_, began), (name, ended) in pairwise(marks):
            times.setdefault(name, []).append(1000 * (ended - began))
    middle = {name: statistics.median(all_) for name, all_ in times.items()}
    host = sum(middle.values()) - middle["compute"]
    print_table(
        f"One greedy step of {running.batch}, CPU-ms: schedule + build "
        f"{middle['schedule'] + middle['build']:.2f}, host part {host / sum(middle.values()):.1%}",
        list(middle),
        [[f"{value:.2f}" for value in middle.values()]],
    )


def contenders(
    models: Mapping[str, TorchModel], peers: Sequence[tuple[str, Any]], batch: int, rounds: int
) -> dict[str, Callable[[], float]]:
    steps = STEPS * (rounds + 2)
    own = {name: Decoding(model, batch, steps) for name, model in models.items()}
    return {**own, **{name: peer.decoding(batch) for name, peer in peers}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", type=Path, help="folder of llama-batched-bench, llama-quantize")
    asked = parser.parse_args()
    models = {f"dpkit {asked.dtype}": load_torch_model(MODEL, dtype=asked.dtype)}
    models["dpkit int4"] = load_torch_model(MODEL, quant="int4")
    for model in models.values():
        model.threads_per_engine = 1
    with tempfile.TemporaryDirectory() as workshop:
        peers: list[tuple[str, Any]] = []
        if util.find_spec("transformers"):
            peers.append(("transformers", Transformers(asked.dtype)))
        if asked.llama:
            peers += llama_cpps(asked.llama, Path(workshop)).items()
        for batch in BATCHES:
            turns = contenders(models, peers, batch, asked.rounds)
            report(f"Decode, batch {batch}", compete(turns, rounds=asked.rounds), models)
        turns = {name: prefill(model) for name, model in models.items()}
        turns |= {name: peer.prefill for name, peer in peers}
        report(f"Prefill of {PREFILL}", compete(turns, rounds=asked.rounds), models)
    stages(models[f"dpkit {asked.dtype}"])


if __name__ == "__main__":
    main()
