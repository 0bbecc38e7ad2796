"""What the routes of one server share: the cluster behind them, and whether it can be had.

A server is there before its cluster is, and a little longer: until `use`, and after `drain`, it
says so instead of answering. Knows no route and no socket.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import trio
from attrs import frozen

from dpkit.config.server import ServerConfig, keys_in
from dpkit.names import EngineState
from dpkit.serve.errors import ApiError, bad_request
from dpkit.serve.keys import Keys
from dpkit.serve.logprobs import Spelling
from dpkit.serve.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from dpkit.messages import EngineId, SamplingParams
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.prompts import Prompt
    from dpkit.nursery.reload import Plan
    from dpkit.serve.face import Ending, Handler, Request
    from dpkit.serve.site import Answered

    Reload: TypeAlias = Callable[[], Awaitable[Plan]]
    Observer: TypeAlias = "Callable[[Generated], None]"

T = TypeVar("T")

_log = logging.getLogger(__name__)

_AT_ONCE = 8 * 1024
"""Characters or tokens of a prompt that are tokenized here and now: it takes some 10 ms."""
_TOKENIZERS = 2
"""Longer prompts that are tokenized at the same time, in threads."""
_RETRY_S = 1.0


class State(StrEnum):
    """Whether requests are served."""

    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """Up, but no engine is ready. Requests wait for one."""
    DRAINING = "draining"


@frozen(kw_only=True)
class Generated:
    """One request for generated text that has ended, for metrics and traces.

    Times are on Trio's clock.
    """

    request: Request
    id: str
    """Of the answer, and, with a suffix for each of several, of what the engines had."""
    model: str
    """As clients call it."""
    sampling: SamplingParams
    """As it was asked for, but for `max_tokens`."""
    n: int
    """Answers to each prompt."""
    engines: tuple[EngineId, ...]
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompts, those found in a cache; None: not known."""
    output_tokens: int
    max_tokens: int | None
    choices: int
    finish_reasons: tuple[str | None, ...]
    """Of each choice; None: it did not finish by itself."""
    streamed: bool
    error: Exception | None
    """What the client was told instead of, or after, the text."""
    ending: Ending | None
    """How the answer ended."""
    received_at: float
    placed_at: float | None
    """When the first of its choices got an engine."""
    first_token_at: float | None
    ended_at: float


class Front:
    """Made once a server.

    Args:
        settings: Names and keys; None: the defaults.
        reload: Reads the config again and applies it; None: nobody can ask for that.
        metrics: Answers ``/metrics``; None: there are none.
    """

    def __init__(
        self,
        settings: ServerConfig | None = None,
        *,
        reload: Reload | None = None,
        metrics: Handler | None = None,
    ) -> None:
        self.settings = settings = settings or ServerConfig()
        self.api_keys = Keys(keys_in(settings.api_key_env))
        self.admin_keys = Keys(keys_in(settings.admin_key_env))
        self.created = int(time.time())
        self.reload = reload
        self.metrics = metrics
        self.observers: list[Observer] = []
        """Told of each request for text that has ended. They must not wait."""
        self.http_observers: list[Callable[[Answered], None]] = []
        """Told of each answer of the server's, whatever was asked."""
        self._cluster: Cluster | None = None
        self._is_draining = False
        self._tokenizers = trio.CapacityLimiter(_TOKENIZERS)
        self._spelling: Spelling | None = None
        self._names: set[str] = set()

    def __repr__(self) -> str:
        return f"<Front: {self.state}, {len(self._names)} requests>"

    def use(self, cluster: Cluster) -> None:
        """Serve a cluster from now on."""
        self._cluster = cluster
        self._spelling = Spelling(cluster.client.spell)

    def drain(self) -> None:
        """Be unready from now on, so that others send no requests here. Those that come are served.

        For as long as the cluster takes them, that is: see `Cluster.drain`.
        """
        self._is_draining = True

    @property
    def is_starting(self) -> bool:
        """Whether there is no cluster yet."""
        return self._cluster is None

    @property
    def state(self) -> State:
        """Whether requests are served."""
        if self._is_draining:
            return State.DRAINING
        if self._cluster is None:
            return State.STARTING
        ready = any(engine.state is EngineState.READY for engine in self._cluster.engines)
        return State.READY if ready else State.UNREADY

    @property
    def cluster(self) -> Cluster:
        """The one that is served.

        Raises:
            ApiError: 503, it is not up yet.
        """
        if self._cluster is None:
            message = "the engines are starting; try again in a moment"
            raise ApiError(503, message, code="starting", retry_after=_RETRY_S)
        return self._cluster

    @property
    def spelling(self) -> Spelling:
        """Texts of single tokens; there is one as soon as there is a cluster."""
        assert self._spelling is not None  # noqa: S101 - nobody asks before
        return self._spelling

    @property
    def model(self) -> str:
        """The model's name for clients."""
        return self.settings.model_name or self.cluster.config.engines[0].model

    def check_model(self, asked: str | None) -> None:
        """Refuse whoever asks for another model; who names none gets this one.

        Raises:
            ApiError: 404; 503, nothing is served yet.
        """
        served = self.cluster and self.model
        if asked is not None and asked != served:
            message = f"there is no model {asked[:200]!r} here, only {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def pinned(self, request: Request) -> str | None:
        """The engine that a request asks for by its rank; None: any.

        Raises:
            ApiError: 400, there is no such rank.
        """
        asked = request.header("x-data-parallel-rank")
        if asked is None:
            return None
        names = {str(engine.rank): engine.name for engine in self.cluster.engines}
        if (name := names.get(asked.strip())) is None:
            ranks = ", ".join(names)
            message = f"X-data-parallel-rank: there is no engine {asked[:40]!r}; ranks are {ranks}"
            raise bad_request(message, "X-data-parallel-rank")
        return name

    @property
    def longest_prompt(self) -> int | None:
        """Tokens that a prompt may have, for `encode`; None: not known, or not yet."""
        return None if self._cluster is None else self._cluster.longest_prompt

    async def encode(self, prompt: Prompt, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a prompt. A long one is tokenized in a thread: it may take seconds.

        Args:
            prompt: Of whichever kind.
            most: Tokens that it may have; None: any number.

        Raises:
            RequestRejected: it cannot be encoded, or has more tokens.
        """
        encode = partial(self.cluster.client.encode, most=most)
        if _size(prompt) <= _AT_ONCE:
            return encode(prompt)
        return await in_thread(encode, prompt, limiter=self._tokenizers)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; of many, from a thread.

        Raises:
            RequestRejected: one is no token of the model, or they cannot be decoded.
        """
        decode = self.cluster.client.decode
        if len(token_ids) <= _AT_ONCE:
            return decode(token_ids)
        return await in_thread(decode, token_ids, limiter=self._tokenizers)

    def name(self, wanted: str) -> str:
        """A name for a request that no other one has now; give it back with `forget`."""
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}~{number}"
        self._names.add(name)
        return name

    def forget(self, name: str) -> None:
        """Let others have a name."""
        self._names.discard(name)

    def tell(self, generated: Generated) -> None:
        """Have the observers know. What one raises is its own affair."""
        for observer in self.observers:
            _tell(observer, generated)

    def tell_answered(self, answered: Answered) -> None:
        """The same of each answer, whatever was asked; for a server to call."""
        for observer in self.http_observers:
            _tell(observer, answered)


def _tell(observer: Callable[[T], None], what: T) -> None:
    try:
        observer(what)
    except Exception:  # noqa: BLE001 - whatever it raises
        _log.exception("an observer of answers failed")


def _size(prompt: Prompt) -> int:
    """Characters or tokens."""
    return sum(_sizes(prompt)) if isinstance(prompt, list) else len(prompt)


def _sizes(prompt: list[object]) -> Iterator[int]:
    if prompt and isinstance(prompt[0], int):
        yield len(prompt)
        return
    for message in prompt:
        yield sum(map(len, message.values())) if isinstance(message, dict) else 1
