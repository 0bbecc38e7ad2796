"""The exception tree. Each error tells whose fault it is, what was being done, and what to try.

`http_status` and `retryable` are class facts, so that a front end maps errors without a table;
`engine` and `request_id` are facts of the occurrence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import EngineId

E = TypeVar("E", bound=Exception)


def describe(error: BaseException) -> str:
    """``ValueError: what it says``: for messages, where an error that cannot speak may come too."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - whatever other people's `__str__` may raise
        return f"{name} (which cannot be shown)"
    return f"{name}: {said}" if said else name


def plural(count: int, noun: str) -> str:
    """A count with its noun, for messages: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class DpkitError(Exception):
    """Base of everything dpkit raises on purpose."""

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, engine: EngineId | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.request_id = request_id


def untraced(error: E) -> E:
    """The same error, but not where it was raised: for who keeps it longer than that matters.

    A traceback holds all that its functions held, who keeps the error among it: then nothing of a
    request is gone until the garbage collector comes by. Other people's errors stay as they are.
    """
    if not isinstance(error, DpkitError):
        return error
    copy = bare(error)
    copy.__cause__ = error.__cause__
    return copy


def bare(error: E) -> E:
    """The same error, one of ours: neither where it was raised, nor what it was raised for."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


class ConfigError(DpkitError):
    """The config file is wrong (yours). `problems` holds every error of the file, in file order."""

    http_status = 400

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ModelNotFound(DpkitError):  # noqa: N818 - reads as what happened, like FileNotFoundError
    """The model named in the config is not here (yours); the message says how to get it."""


class ModelUnsupported(DpkitError):  # noqa: N818
    """The model's files are there but dpkit cannot run them; the message names what is missing."""


class ModelFailed(DpkitError):  # noqa: N818
    """A model broke its contract (its author's): the message names its class and says how.

    Its result does not fit the batch, or it raised what is no `Exception`, such as SystemExit,
    which is `__cause__` then: a model's code ends a life of its engine, but no program, no scope.
    """


class PolicyFailed(DpkitError):  # noqa: N818
    """A balancing policy raised (its author's): the message names it and the method, and says what.

    Likewise if it picked no engine. `__cause__` is what it raised, unless that was a `DpkitError`,
    which is raised as it is.
    """


class OutOfMemory(DpkitError):  # noqa: N818
    """A step needs more memory than its device has (the world's). Smaller steps are tried first.

    Models raise this, or Python's own MemoryError.
    """

    http_status = 503
    retryable = True


class RequestRejected(DpkitError):  # noqa: N818
    """The request can never be served as it is (yours); the message says by how much it is off."""

    http_status = 400


class EngineLost(DpkitError):  # noqa: N818
    """The engine that held the request is gone (the world's); the partial output stays readable."""

    http_status = 503
    retryable = True


class DeadlineExceeded(DpkitError):  # noqa: N818
    """The request's deadline passed before its end (the world's); what came so far is readable."""

    http_status = 504


class TryLater(DpkitError):  # noqa: N818
    """Not now: the same request may be served in `retry_after` seconds. Nothing was begun."""

    http_status = 503
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        retry_after: float,
        engine: EngineId | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, engine=engine, request_id=request_id)
        self.retry_after = retry_after


class Overloaded(TryLater):
    """The queue is full, or the request waited there for `queue_timeout` (the world's)."""

    http_status = 429


class Draining(TryLater):
    """The cluster finishes what it has and takes nothing new (the operator's)."""


class NoEngineReady(DpkitError):  # noqa: N818
    """No engine may be picked at the moment. Waited for inside dpkit: users do not see it."""

    http_status = 503
    retryable = True


NO_BUGS = (ConfigError, ModelNotFound, ModelUnsupported, OutOfMemory)
"""What a user or the machine is to mend: the words say it all, and a traceback nothing more."""


def reason(cause: BaseException) -> str:
    """Why an engine is lost, to stand after the words that it is: nothing is said twice."""
    if isinstance(cause, EngineLost):
        return str(cause).removeprefix(f"engine {cause.engine} is lost: ")
    return describe(cause)


class WireError(DpkitError):
    """A message that cannot be read, or that is too large (the peer's): its connection ends."""

    http_status = 502


class LaunchFailed(DpkitError):  # noqa: N818
    """A process did not come up (the world's); the message has its exit status and last words."""

    http_status = 503


class ClusterClosed(DpkitError):  # noqa: N818
    """The cluster was left while a request was being made or awaited (yours)."""

    http_status = 503
    retryable = True


class ScalingFailed(DpkitError):  # noqa: N818
    """New engines did not come up, and are gone again; those that were there serve on."""

    http_status = 503


class ServiceFailed(DpkitError):  # noqa: N818
    """A background service died; `__cause__` is the first error, the message names the service."""

    http_status = 503


class ClusterFailed(ServiceFailed):
    """Too few engines are left, or dpkit found a bug of its own; the cause is the first error."""


class ClusterNotStarted(ClusterFailed):
    """The cluster failed before its block began; nothing was served."""


class InternalError(DpkitError):
    """An invariant is broken: a bug in dpkit. Please report it with the message."""
