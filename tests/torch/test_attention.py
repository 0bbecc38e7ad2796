"""All attention backends say the same; what needs a GPU is tested as far as a CPU can."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dpkit.engine.models.torch.attention import BACKENDS, attend, choose_backend
from dpkit.engine.models.torch.attention.base import CacheKind, Span
from dpkit.engine.models.torch.attention.gather import GatherBackend
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.errors import ModelUnsupported
from dpkit.messages import Batch, BatchRow, SamplingParams
from dpkit.testing.tiny import write_tiny_directory

if TYPE_CHECKING:
    from pathlib import Path

HEADS, KV_HEADS, SIZE = 4, 2, 16

# (start, tokens) of each row: decodes of very different length, whole prompts, chunks on a past.
STEPS = {
    "decodes": [(0, 1), (6, 1), (3, 1), (40, 1), (37, 1), (16, 1)],
    "chunks": [(0, 7), (5, 3), (0, 2), (13, 9)],
    "both": [(9, 1), (30, 1), (0, 1), (0, 11), (4, 4)],
    "one": [(12, 1)],
}


def batch(step: list[tuple[int, int]], block_size: int) -> Batch:
    """Rows whose blocks are scattered."""
    free = iter(np.random.default_rng(1).permutation(512).tolist())
    return Batch(
        rows=tuple(
            BatchRow(
                request_id=str(index),
                prompt_token_ids=(),
                sampling=SamplingParams(),
                token_ids=[1] * count,
                start=start,
                block_ids=[next(free) for _ in range((start + count) // block_size + 2)],
                output_index=None,
            )
            for index, (start, count) in enumerate(step)
        )
    )


def run(name: str, step: list[tuple[int, int]], block_size: int, scale: float | None) -> Any:
    torch.manual_seed(0)
    tokens = sum(count for _, count in step)
    queries = torch.randn(tokens, HEADS, SIZE)
    keys, values = torch.randn(2, tokens, KV_HEADS, SIZE)
    cache = torch.randn(2, 512, block_size, KV_HEADS, SIZE)
    tensors = build_tensors(
        batch(step, block_size), CacheKind(block_size=block_size), BACKENDS[name]
    )
    return attend(queries, keys, values, cache, tensors, scale=scale)


def flash_attn_varlen_func(  # the package's signature
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    block_table,
) -> torch.Tensor:  # fmt: skip
    """What the package documents that its function computes."""
    assert causal
    parts = []
    for row, table in enumerate(block_table):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        context = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert end - begin <= max_seqlen_q
        assert context <= max_seqlen_k
        keys, values = (part[table].flatten(0, 1)[:context].transpose(0, 1) for part in (k, v))
        mask = torch.ones(end - begin, context, dtype=torch.bool).tril(context - (end - begin))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None], keys[None], values[None],
                attn_mask=mask, scale=softmax_scale, enable_gqa=True,
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(parts)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, __spec__=object())
    monkeypatch.setitem(sys.modules, "flash_attn", package)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", ["gather", "cuda_varlen"])
def test_all_backends_say_the_same(name, step, block_size, scale, flash_attn) -> None:
    expected = run("sdpa", step, block_size, scale)
    assert torch.allclose(run(name, step, block_size, scale), expected, atol=1e-5)


def test_one_long_text_does_not_make_the_others_long() -> None:
    kind = CacheKind(block_size=4)
    spans = [
        Span(tokens=slice(i, i + 1), start=4 * blocks - 1, blocks=np.arange(blocks))
        for i, blocks in enumerate([1, 2, 3, 4, 100, 3])
    ]
    plan = GatherBackend().plan(spans, kind)
    padded = {tuple(group.tokens.tolist()): group.mask.shape[-1] // 4 for group in plan.decodes}
    assert padded == {(0,): 1, (1,): 2, (2, 3, 5): 4, (4,): 100}


def kind(device: str, dtype: torch.dtype = torch.bfloat16, block_size: int = 16) -> CacheKind:
    return CacheKind(device=torch.device(device), dtype=dtype, block_size=block_size)


def test_the_best_backend_is_chosen_by_what_there_is(monkeypatch, flash_attn) -> None:
    def chosen(*args: Any) -> str:
        backend = choose_backend.__wrapped__(kind(*args))
        return next(name for name, known in BACKENDS.items() if known is backend)

    assert chosen("cpu") == "gather"
    assert chosen("cuda:0", torch.bfloat16, 256) == "cuda_varlen"
    assert chosen("cuda:0", torch.bfloat16, 16) == "gather"
    assert chosen("cuda:0", torch.float32, 256) == "gather"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert chosen("cuda:0", torch.bfloat16, 256) == "gather"


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("fast", kind("cpu"), "no attention backend 'fast'; there are cuda_varlen, gather, sdpa"),
        (
            "cuda_varlen",
            kind("cpu"),
            "attention backend 'cuda_varlen' needs a CUDA device, not cpu",
        ),
        ("cuda_varlen", kind("cuda", torch.float32), "computes in float16 and bfloat16, not torch"),
        ("cuda_varlen", kind("cuda"), "a block_size that is a multiple of 256, not 16"),
    ],
)
def test_a_backend_that_cannot_says_why(name, where, message, flash_attn) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        choose_backend(where, name)


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ModelUnsupported, match="'cuda_varlen' needs the package flash-attn"):
        choose_backend.__wrapped__(kind("cuda", torch.bfloat16, 256), "cuda_varlen")


def test_a_backend_that_can_is_found() -> None:
    assert choose_backend(kind("cpu"), "sdpa") is BACKENDS["sdpa"]


def test_a_model_may_be_told_which(tmp_path: Path, load, make_engine) -> None:
    folder = write_tiny_directory(tmp_path / "tiny", tie_word_embeddings=False)
    asked = {f"{n}": ([5, 9, 200] * n, SamplingParams(max_tokens=9)) for n in (1, 2, 9)}
    told = make_engine(load(folder, attention="sdpa"), max_num_batched_tokens=8)
    assert told.answer(asked) == make_engine(load(folder)).answer(asked)
    with pytest.raises(ModelUnsupported, match="'cuda_varlen' needs a CUDA device, not cpu"):
        make_engine(load(folder, attention="cuda_varlen"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "abacus"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, load, device: str) -> None:
    folder = write_tiny_directory(tmp_path / "tiny")
    with pytest.raises(ModelUnsupported, match=f"device '{device}' cannot be used here: "):
        load(folder, device=device)
