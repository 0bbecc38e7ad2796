"""Models of other people: whatever their code does, it ends one life of one engine and no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import trio

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ClusterNotStarted, EngineLost, ModelFailed
from dpkit.messages import StepResult
from dpkit.nursery.cluster import open_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config
    from dpkit.messages import Batch


class Unspeakable(Exception):  # noqa: N818
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")

    __repr__ = __str__


class Rough(EchoModel):
    """Raises or returns `does` whenever it meets the request "bomb"."""

    does: ClassVar[object] = None

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if any(row.request_id == "bomb" for row in batch.rows):
            if isinstance(self.does, BaseException):
                raise self.does
            return self.does  # type: ignore[return-value]
        return super().execute(batch, cache)


class RoughThread(Rough):
    """The same in a thread of its own."""

    inline: ClassVar[bool] = False


class RoughStart(EchoModel):
    """Cannot even allocate."""

    def allocate(self, **_: Any) -> Any:
        raise Rough.does  # type: ignore[misc]


ROUGH: list[object] = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
    ExceptionGroup("several", [ValueError()]),
    Unspeakable(),
    None,
    StepResult(sampled=[]),
    StepResult(sampled=iter([1])),  # type: ignore[arg-type]
    StepResult(sampled=[1], duration_s=float("nan")),
    StepResult(sampled=[1], duration_s=-1.0),
    StepResult(sampled=[10**30]),
]


@pytest.mark.parametrize("does", ROUGH, ids=lambda does: type(does).__name__)
@pytest.mark.parametrize("kind", ["Rough", "RoughThread"])
async def test_whatever_a_model_does_costs_its_engine_one_life(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, kind: str, does: object
) -> None:
    monkeypatch.setattr(Rough, "does", does)
    config = make_config(
        f"{__name__}:{kind}", "admission.retries=0", "engines.0.supervision.backoff=1ms"
    )
    async with open_cluster(config) as cluster:
        with pytest.raises(EngineLost, match="was lost while it held request bomb: "):
            await cluster.client.complete("hi", request_id="bomb", engine="engine-0")
        assert (await cluster.client.complete("hi", engine="engine-1")).text == "hi"
        with trio.fail_after(5):
            assert (await cluster.client.complete("hi", engine="engine-0")).text == "hi"
        [ended, _] = cluster.statistics().engines
        assert ended.restarts == 1
        assert ended.last_error


@pytest.mark.parametrize(
    "does", [SystemExit(3), Unspeakable()], ids=lambda does: type(does).__name__
)
async def test_a_model_that_cannot_allocate_is_a_cluster_that_does_not_start(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, does: BaseException
) -> None:
    monkeypatch.setattr(Rough, "does", does)
    config = make_config(f"{__name__}:RoughStart", "engines.0.supervision.intensity=0")
    with pytest.raises(ClusterNotStarted, match="failed: ") as caught:
        async with open_cluster(config):
            pass
    cause = caught.value.__cause__
    assert cause is does if isinstance(does, Exception) else isinstance(cause, ModelFailed)
