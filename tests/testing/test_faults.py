"""A faulty model does what its plan says, when its plan says it, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.config.load import parse_config
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models import load_model
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import EngineLost, ModelFailed, ModelNotFound
from dpkit.messages import GenerateRequest
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.faults import (
    CRASH,
    FOR_EVER,
    GARBAGE,
    HANG,
    Fault,
    FaultKind,
    FaultyModel,
    InjectedCrash,
)
from dpkit.testing.wrapper import ModelOfEach, ModelWrapper, named

if TYPE_CHECKING:
    from dpkit.messages import StepResult

LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_blocks=512)


def steps(model: FaultyModel, count: int) -> list[StepResult | str]:
    """What so many steps of one request gave: a result, or the error's type."""
    core = EngineCore(model, limits=LIMITS)
    seen: list[StepResult | str] = []
    for _ in range(count):
        core.end()
        core.add(GenerateRequest(request_id="r", prompt_token_ids=tuple(b"abcdefgh")))
        batch = core.schedule()
        assert batch is not None
        try:
            result = model.execute(batch, None)
            core.apply(batch, result)
            seen.append(result)
        except (InjectedCrash, ModelFailed, MemoryError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def durations(model: FaultyModel, count: int) -> list[float | str]:
    return [each if isinstance(each, str) else each.duration_s for each in steps(model, count)]


CRASHED = "InjectedCrash: injected: crash in step {}"


def test_a_step_crashes_when_it_is_planned() -> None:
    model = FaultyModel(EchoModel(), {1: CRASH})
    assert durations(model, 3) == [0.0, CRASHED.format(1), 0.0]
    assert model.injected == [CRASH]


def test_a_hang_is_a_step_of_thirty_years() -> None:
    assert durations(FaultyModel(EchoModel(), {0: HANG}), 2) == [FOR_EVER, 0.0]


def test_a_slow_model_is_slow_in_every_step_until_it_is_mended() -> None:
    model = FaultyModel(EchoModel(), always=Fault(FaultKind.SLOW, 10))
    assert durations(model, 2) == [0.01, 0.01]
    model.always = None
    assert durations(model, 1) == [0.0]


def test_memory_runs_out_above_so_many_tokens() -> None:
    assert durations(FaultyModel(EchoModel(), {0: Fault(FaultKind.OUT_OF_MEMORY, 7)}), 1) == [
        "MemoryError: injected: oom=7 in step 0, of 8 tokens"
    ]
    model = FaultyModel(EchoModel(), {0: Fault(FaultKind.OUT_OF_MEMORY, 8)})
    assert durations(model, 1) == [0.0]
    assert not model.injected


def test_garbage_is_noticed_by_the_engine() -> None:
    [said] = steps(FaultyModel(EchoModel(), {0: GARBAGE}), 1)
    assert str(said).startswith("ModelFailed: ")


def test_a_fault_may_be_put_in_at_any_time() -> None:
    model = FaultyModel(EchoModel())
    assert durations(model, 1) == [0.0]
    model.inject(CRASH)
    assert durations(model, 2) == [CRASHED.format(1), 0.0]


def test_a_life_may_fail_at_its_start() -> None:
    model = FaultyModel(EchoModel(), births={1: CRASH})
    model.allocate(num_blocks=1, block_size=1)
    with pytest.raises(InjectedCrash, match="at the start of life 1"):
        model.allocate(num_blocks=1, block_size=1)
    model.allocate(num_blocks=1, block_size=1)


@pytest.mark.parametrize("text", ["crash", "hang", "slow=10", "oom=64", "garbage", "slow=2.5"])
def test_a_fault_survives_its_text(text: str) -> None:
    assert str(Fault.parse(text)) == text


def test_an_unknown_fault_is_told() -> None:
    with pytest.raises(ValueError, match="meltdown"):
        Fault.parse("meltdown")


def test_a_named_model_is_the_very_object_and_its_name_ends_with_the_block() -> None:
    model = EchoModel()
    with named(model) as name:
        assert load_model(name) is model
    with pytest.raises(ModelNotFound, match="has no"):
        load_model(name)


def test_a_wrapper_runs_where_its_model_runs() -> None:
    class Threaded(EchoModel):
        inline = False

    assert ModelWrapper(EchoModel()).inline
    assert not ModelWrapper(Threaded()).inline
    assert ModelWrapper(EchoModel()).spec is EchoModel.spec


async def test_each_engine_may_have_a_model_of_its_own(autojump_clock: object) -> None:
    broken = FaultyModel(EchoModel(), always=CRASH)
    with named(ModelOfEach({8: EchoModel(), 9: broken})) as name:
        config = parse_config(
            "admission = { retries = 0 }\n"
            f'[[engines]]\nname = "good"\nmodel = "{name}"\nkv = {{ num_blocks = 8 }}\n'
            f'[[engines]]\nname = "bad"\nmodel = "{name}"\nkv = {{ num_blocks = 9 }}\n'
        )
        async with open_cluster(config) as cluster:
            assert (
                await cluster.client.complete("abc", max_tokens=9, engine="good-0")
            ).text == "abc"
            with pytest.raises(EngineLost, match="bad-0"):
                await cluster.client.complete("abc", max_tokens=9, engine="bad-0")
            assert broken.injected == [CRASH]
