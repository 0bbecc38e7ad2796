"""bfloat16 and int4 say nearly what float32 says; whatever the CPU lacks has a way around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from dpkit.engine.models import load_model
from dpkit.engine.models.torch import linear, precision
from dpkit.engine.models.torch.precision import resolve_dtype
from dpkit.errors import ModelUnsupported
from dpkit.messages import SamplingParams
from dpkit.names import Dtype, Quant
from dpkit.testing.tiny import write_tiny_directory
from tests.torch.lab import scores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who"

# By relative error: bfloat16 has 8 bits, int4 of random weights has 4 with 32 sharing a scale.
ROUGHLY = {"none": 0.02, "int4": 0.25}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen2ForCausalLM"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    return write_tiny_directory(path, architectures=[request.param], mlp_bias=True)


IDS = [5, 9, 200, 3, 17, 44, 8, 101, 262, 60, 7]


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_fewer_bits_say_nearly_the_same(folder: Path, load, quant: str) -> None:
    model = load(folder, dtype="bfloat16", quant=quant)
    exact = scores(load(folder), IDS)
    assert relative_error(scores(model, IDS), exact) < ROUGHLY[quant]


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_batches_run_to_their_end(folder: Path, load, make_engine, quant: str) -> None:
    engine = make_engine(load(folder, dtype="bfloat16", quant=quant), block_size=4, num_blocks=64)
    asked = {f"{n}": (IDS * n, SamplingParams(max_tokens=20, ignore_eos=True)) for n in range(1, 9)}
    answers = engine.answer(asked)
    assert {len(answer) for answer in answers.values()} == {20}
    assert engine.core.statistics().preemptions > 0


def test_a_cache_in_bfloat16_is_half_as_large(folder: Path, load) -> None:
    exact, half = load(folder), load(folder, dtype="bfloat16")
    assert half.spec.kv_bytes_per_token * 2 == exact.spec.kv_bytes_per_token
    assert half.allocate(num_blocks=8, block_size=4).nbytes == 8 * 4 * half.spec.kv_bytes_per_token


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch without oneDNN's operators."""
    linear.can_pack.cache_clear()
    monkeypatch.setattr(linear, "_ONEDNN", torch.ops.no_such_library)
    yield
    linear.can_pack.cache_clear()


def test_without_the_packing_operators_all_goes_on(folder: Path, load, no_packing) -> None:
    model = load(folder, dtype="bfloat16")
    assert isinstance(model._transformer._head, linear.Fused)
    assert relative_error(scores(model, IDS), scores(load(folder), IDS)) < ROUGHLY["none"]


def test_packing_changes_nothing_but_the_rounding() -> None:
    if not linear.can_pack(torch.bfloat16):
        pytest.skip("THIS TORCH CANNOT PACK bfloat16")
    weights = [torch.randn(16, 32), torch.randn(48, 32)]
    biases = [None, torch.randn(48)]
    inputs = torch.randn(5, 32)
    expected = linear.Mapped(weights, biases)(inputs)
    for kind in (linear.Fused, linear.Packed):
        for found, exact in zip(kind(weights, biases)(inputs), expected, strict=True):
            assert torch.allclose(found, exact, atol=1e-4)


def test_int4_keeps_each_groups_least_and_greatest() -> None:
    weight = torch.randn(16, 64)
    levels, scales = linear.quantise(weight)
    scale, middle = scales.transpose(0, 1).unbind(-1)  # [outputs, groups] each
    found = (levels.view(16, 2, 32) - 8) * scale[..., None] + middle[..., None]
    groups = weight.view(16, 2, 32)
    assert torch.allclose(found.aminmax(dim=-1).min, groups.aminmax(dim=-1).min, atol=1e-5)
    assert torch.allclose(found.aminmax(dim=-1).max, groups.aminmax(dim=-1).max, atol=1e-5)
    assert ((found - groups).abs() <= scale[..., None] * 0.501).all()


def test_a_group_of_equals_is_kept() -> None:
    _, scales = linear.quantise(torch.full((16, 32), 0.5, dtype=torch.bfloat16))
    assert scales[0, :, 1].tolist() == [0.5] * 16


def test_matrices_that_int4_cannot_hold_stay(tmp_path: Path, load) -> None:
    folder = write_tiny_directory(tmp_path / "tiny", hidden_size=48, head_dim=12)
    model = load(folder, dtype="auto", quant="int4")
    first = model._transformer._layers[0]
    assert not isinstance(first.gate_up, linear.Int4)  # 48 inputs are one and a half groups
    assert isinstance(first.down, linear.Int4)
    assert scores(model, IDS).isfinite().all()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse avx512f avx512_bf16", Dtype.BFLOAT16),
        ("fpu amx_bf16 amx_tile", Dtype.BFLOAT16),
        ("fpu sse avx2", Dtype.FLOAT32),
    ],
)
def test_auto_is_what_the_cpu_is_fast_at(tmp_path: Path, monkeypatch, flags, expected) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(
        precision, "cpu_is_fast_at_bfloat16", precision.cpu_is_fast_at_bfloat16.__wrapped__
    )
    assert resolve_dtype(Dtype.AUTO) is expected
    assert resolve_dtype(Dtype.FLOAT32) is Dtype.FLOAT32


def test_a_machine_that_does_not_say_computes_in_float32(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "nothing")
    assert precision.cpu_is_fast_at_bfloat16.__wrapped__() is False


def test_int4_computes_in_bfloat16() -> None:
    assert resolve_dtype(Dtype.AUTO, Quant.INT4) is Dtype.BFLOAT16
    with pytest.raises(ModelUnsupported, match='quant = "int4" computes in bfloat16, not in float'):
        resolve_dtype(Dtype.FLOAT32, Quant.INT4)


def test_what_is_asked_for_reaches_the_model(folder: Path) -> None:
    def kv_bytes(**options: Any) -> int:
        return load_model(str(folder), **options).spec.kv_bytes_per_token

    exact = kv_bytes(dtype=Dtype.FLOAT32)
    assert kv_bytes(dtype=Dtype.BFLOAT16) * 2 == exact
    assert kv_bytes(quant=Quant.INT4) * 2 == exact


@pytest.fixture(scope="module")
def exact_scores(demo_path: Path, load) -> torch.Tensor:
    model = load(demo_path)
    return scores(model, model.tokenizer().encode(STORY)).log_softmax(-1)


@pytest.mark.model
@pytest.mark.parametrize(("quant", "divergence"), [("none", 0.005), ("int4", 0.02)])
def test_the_demo_model_says_nearly_the_same(
    demo_path: Path, load, exact_scores, quant: str, divergence: float
) -> None:
    model = load(demo_path, dtype="bfloat16", quant=quant)
    found = scores(model, model.tokenizer().encode(STORY)).log_softmax(-1)
    apart = torch.nn.functional.kl_div(found, exact_scores, log_target=True, reduction="batchmean")
    agreed = (found.argmax(-1) == exact_scores.argmax(-1)).float().mean()
    print(f"{quant}: KL {apart.item():.5f}, same best token {agreed.item():.0%}")
    assert apart.item() < divergence
    assert agreed.item() >= 0.8
