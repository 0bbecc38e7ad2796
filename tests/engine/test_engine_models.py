"""Models by name: echo, cost presets, your own class."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.costmodel import PRESETS, StepCost
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models import load_model, load_tokenizer, loads_at_once
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ModelNotFound, ModelUnsupported
from dpkit.messages import (
    Batch,
    BatchRow,
    GenerateRequest,
    ModelSpec,
    SamplingParams,
    StepResult,
)
from dpkit.names import FinishReason
from dpkit.text.bytes import ByteTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.abc import Model


class MyModel(EchoModel):
    """What a user brings."""


class NeedsArguments(EchoModel):
    """What cannot be made from a config."""

    def __init__(self, path: str) -> None:
        self.path = path


def generate(model: Model, prompt: str, **sampling: Any) -> tuple[str, FinishReason | None]:
    core = EngineCore(model, limits=resolve_limits(model.spec))
    tokenizer = model.tokenizer()
    core.add(
        GenerateRequest(
            request_id="r",
            prompt_token_ids=tuple(tokenizer.encode(prompt)),
            sampling=SamplingParams(**sampling),
        )
    )
    decoder, text, reason = tokenizer.decoder(), "", None
    while core.has_requests():
        [output] = core.step()
        text += decoder.feed(output.token_ids)
        reason = output.finish_reason
    return text + decoder.finish(), reason


def test_echo_says_the_prompt_once_or_over_and_over() -> None:
    echo = load_model("echo")
    assert echo.inline
    assert generate(echo, "Grüße!") == ("Grüße!", FinishReason.STOP)
    assert generate(echo, "Grüße!", max_tokens=4) == ("Grü", FinishReason.LENGTH)
    assert generate(echo, "ab", max_tokens=5, ignore_eos=True) == ("ababa", FinishReason.LENGTH)


def test_cost_gives_exactly_as_many_tokens_as_asked() -> None:
    cost = load_model("cost:h100-8b")
    assert cost.inline
    assert generate(cost, "ab", max_tokens=5) == ("ababa", FinishReason.LENGTH)


def test_a_preset_brings_its_limits() -> None:
    assert len(PRESETS) == 11
    for name, preset in PRESETS.items():
        limits = resolve_limits(load_model(f"cost:{name}").spec)
        assert limits.max_num_batched_tokens == 8192
        assert limits.num_blocks == preset.kv_tokens // 16
        assert limits.max_model_len is None
        seqs = {"h200-30b-a3b": 512, "h100-30b-a3b": 512, "h20-4b": 128}.get(name, 256)
        assert limits.max_num_seqs == seqs


def row(tokens: int, start: int, output_index: int | None) -> BatchRow:
    return BatchRow(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        token_ids=[1] * tokens,
        start=start,
        block_ids=[],
        output_index=output_index,
    )


def seconds(preset: str, *rows: BatchRow) -> float:
    return CostModel(preset).execute(Batch(rows=rows), None).duration_s


def test_few_tokens_cost_the_reading_of_weights_and_many_the_arithmetic() -> None:
    decodes = [row(1, 999, 5), row(1, 1999, 1)]
    assert seconds("h100-8b", *decodes) == pytest.approx(
        6.6e-3 + 2 * 2.8e-6 + 3000 * 47e-9, rel=1e-12
    )
    chunks = [row(3000, 1000, None), row(1000, 0, 0)]
    attended = 3000 * 2500 + 1000 * 500  # a token attends, on average, to its chunk's middle
    assert seconds("h100-8b", *decodes, *chunks) == pytest.approx(
        1.5e-3 + 4002 * 18.6e-6 + 2 * 2.8e-6 + 3000 * 47e-9 + attended * 1.25e-9, rel=1e-12
    )


@pytest.mark.parametrize(
    ("preset", "decodes", "prefill", "measured_ms"),
    [
        # vLLM's operators on the card, each decode with 1,024 tokens of context (AIConfigurator)
        ("a100-8b", 1, 0, 11.05),
        ("a100-8b", 64, 0, 16.67),
        ("a100-8b", 0, 8192, 530.3),
        ("h200-30b-a3b", 1, 0, 3.55),
        ("h200-30b-a3b", 16, 0, 9.88),
        ("h200-30b-a3b", 64, 0, 17.33),
        ("h200-30b-a3b", 0, 2048, 34.03),
        ("h200-30b-a3b", 0, 8192, 97.59),
    ],
)
def test_presets_are_near_what_was_measured(
    preset: str, decodes: int, prefill: int, measured_ms: float
) -> None:
    rows = [row(1, 1023, 1)] * decodes + [row(prefill, 0, 0)] * (prefill > 0)
    assert seconds(preset, *rows) == pytest.approx(measured_ms / 1e3, rel=0.1)


def test_host_time_is_added_to_every_step() -> None:
    assert seconds("rtxpro6000-8b", row(1, 0, 1)) == pytest.approx(12.7e-3 + 20e-6 + 87e-9)


def test_experts_are_read_as_tokens_touch_them() -> None:
    cost = StepCost(a_ms=2.9, e_ms=10.7, a2_ms=3, experts=(8, 128), b_us=0, c_us=0, d_ns=0, q_ns=0)

    def weights(tokens: int) -> float:
        return cost.seconds(decodes=tokens, prefill_tokens=0, decode_context=0, prefill_context=0)

    assert weights(1) == pytest.approx(2.9e-3 + 10.7e-3 / 16)
    assert weights(2) == pytest.approx(2.9e-3 + 10.7e-3 * (1 - (15 / 16) ** 2))
    assert weights(10_000) == pytest.approx(13.6e-3)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ModelNotFound, match=r"'h100-9b'; did you mean 'h100-8b'\? there"):
        load_model("cost:h100-9b")
    with pytest.raises(ModelNotFound, match=r"no cost preset 'x'; there are: h100-8b, .*h20-4b$"):
        load_model("cost:x")


def test_your_own_class_is_a_model() -> None:
    model = load_model(f"{__name__}:MyModel")
    assert type(model) is MyModel
    assert isinstance(model.tokenizer(), ByteTokenizer)
    assert model.allocate(num_blocks=1, block_size=1) is None


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_module:Model", ModelNotFound, "No module named 'no_such_module'; is its dir"),
        ("dpkit.abc:NoSuch", ModelNotFound, "module 'dpkit.abc' has no 'NoSuch'"),
        (f"{__name__}:MyModl", ModelNotFound, r"has no 'MyModl'; did you mean 'MyModel'\?"),
        ("dpkit.abc:Tokenizer", ModelUnsupported, "is not a subclass of dpkit.abc.Model"),
        ("dpkit.names:enum", ModelUnsupported, "is not a subclass of dpkit.abc.Model"),
        ("dpkit.abc:Model", ModelUnsupported, "cannot be made without arguments: Can't instant"),
        (f"{__name__}:NeedsArguments", ModelUnsupported, "without arguments: .*'path'"),
    ],
)
def test_a_class_that_is_no_model_says_why(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"loading model '{name}': .*{message}"):
        load_model(name)


class Broken(EchoModel):
    """Fails where a test says."""

    where = ""

    def __init__(self) -> None:
        if self.where == "init":
            raise ValueError("no\nroom")
        if self.where == "exit":
            sys.exit(3)
        if self.where == "Ctrl-C":
            raise KeyboardInterrupt
        if self.where == "spec":
            self.spec = None  # type: ignore[assignment]
        if self.where == "seqs":
            self.spec = ModelSpec(max_num_seqs=0)

    def tokenizer(self) -> ByteTokenizer:
        if self.where == "tokenizer":
            raise OSError("no vocabulary")
        if self.where == "tokenizer exits":
            sys.exit(3)
        if self.where == "own words":
            raise ModelUnsupported("a vocabulary of another world")
        return 5 if self.where == "no tokenizer" else super().tokenizer()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("where", "message", "cause"),
    [
        ("init", "ValueError: no\nroom", ValueError),
        ("exit", "SystemExit: 3", SystemExit),
        ("spec", "its spec must be a ModelSpec, not None", type(None)),
        ("seqs", "ValueError: max_num_seqs must be a whole number of at least 1, not", ValueError),
    ],
)
def test_a_class_that_fails_in_its_own_code_says_how(
    monkeypatch: pytest.MonkeyPatch, where: str, message: str, cause: type[BaseException]
) -> None:
    monkeypatch.setattr(Broken, "where", where)
    name = f"{__name__}:Broken"
    with pytest.raises(ModelUnsupported, match=f"^loading model '{name}': {message}") as caught:
        load_model(name)
    assert isinstance(caught.value.__cause__, cause)


def test_ctrl_c_in_a_class_is_no_fault_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "where", "Ctrl-C")
    with pytest.raises(KeyboardInterrupt):
        load_model(f"{__name__}:Broken")


def test_what_a_class_says_of_its_tokenizer_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Broken, "where", "own words")
    with pytest.raises(ModelUnsupported, match=r"^a vocabulary of another world$"):
        load_tokenizer(Broken(), "mine")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("tokenizer", "failed: OSError: no vocabulary"),
        ("tokenizer exits", "failed: ModelFailed: .* raised SystemExit: 3"),
        ("no tokenizer", r"returned no tokenizer: int has no encode\(\)"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_told_with_its_class(
    monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    monkeypatch.setattr(Broken, "where", where)
    with pytest.raises(ModelUnsupported, match=rf"model 'mine': .*Broken.tokenizer\(\) {message}"):
        load_tokenizer(Broken(), "mine")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("raise RuntimeError('at import')", ModelUnsupported, "RuntimeError: at import"),
        ("def f(:", ModelUnsupported, r"SyntaxError: invalid syntax \(.*.py, line 1\)"),
        ("import not_there", ModelUnsupported, "ModuleNotFoundError: No module named 'not_there'"),
        ("from os import nothing", ModelUnsupported, "ImportError: cannot import name 'nothing'"),
        ("(5).nothing", ModelUnsupported, "AttributeError: 'int' object has no attribute"),
        ("raise SystemExit", ModelUnsupported, "SystemExit"),
        ("", ModelNotFound, "module '.*' has no 'Mine'"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    error: type[Exception],
    message: str,
) -> None:
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=f"loading model '{name}:Mine': {message}"):
        load_model(f"{name}:Mine")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_model_len", 0),
        ("vocab_size", 0),
        ("vocab_size", "many"),
        ("kv_bytes_per_token", -1),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 1.5),
        ("kv_tokens", 0),
        ("eos_token_ids", 5),
        ("eos_token_ids", frozenset({"a"})),
        ("eos_token_ids", frozenset({-1})),
    ],
)
def test_an_impossible_spec_is_refused_by_the_name_of_the_value(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} must be"):
        ModelSpec(**{key: value})


def test_models_without_weights_load_at_once() -> None:
    assert all(map(loads_at_once, ["echo", "cost:h100-8b", f"{__name__}:MyModel"]))
    slow = ["smollm2-135m", "not_imported:Model", f"{__name__}:row", f"{__name__}:Absent"]
    assert not any(map(loads_at_once, slow))


def test_weights_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dpkit.engine.models.torch", None)
    with pytest.raises(
        ModelUnsupported, match=r"'smollm2-135m': .* is missing; .*torch\]'.* pins torch"
    ):
        load_model("smollm2-135m")


def test_a_result_takes_no_time_unless_it_says_so() -> None:
    assert EchoModel().execute(Batch(rows=(row(1, 0, 0),)), None) == StepResult(sampled=[1])
