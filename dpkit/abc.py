"""What you can bring: a model, a tokenizer, a policy. All of it may be subclassed outside dpkit.

Knows the messages and nothing else. Built-in parts implement the same classes: there is no back
door.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

from dpkit.messages import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from dpkit.messages import Batch, EngineId, GenerateRequest, Room, StepReport, StepResult


class TextDecoder(Protocol):
    """Incremental detokeniser of one request: never emits half a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain."""

    def finish(self) -> str:
        """Return what was held back, malformed or not; call once, at the end."""


class Tokenizer(Protocol):
    """Text to token ids and back, at the client."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of `text`, without a chat template.

        Over HTTP a text of more than 256 characters for each token that there is room for does not
        come here: it is refused as too long.
        """

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> Sequence[int]:
        """Token ids of a conversation in the model's own template.

        Raises:
            RequestRejected: the model has no chat template.
        """

    def decoder(self, prompt_token_ids: Sequence[int] = ()) -> TextDecoder:
        """A fresh decoder for what follows these tokens, whose own text it doesn't say.

        Some tokenizers write the first token of a text unlike the same token later on.
        """


class ModelFace(Protocol):
    """What can be known of a model without its weights; every `Model` is one."""

    spec: ModelSpec

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this model."""


class Model(abc.ABC):
    """Weights: what turns a batch into tokens. Shared by all local engines of a group.

    Holds nothing of any request: what belongs to one engine lives in the cache that `allocate`
    returns, so `execute` may be called from several engines' threads at once, each with its own.
    """

    inline: ClassVar[bool] = False
    """True: `execute` costs nothing and runs on Trio's thread; False: in a thread of the engine."""

    spec: ModelSpec = ModelSpec()

    threads_per_engine: int = 1
    """Threads that one `execute` may use: a cluster shares the cores among its engines."""

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this model."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        """Make one engine's KV cache; called once per engine, in the thread that will use it."""
        return None

    @abc.abstractmethod
    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute one step. Synchronous; an exception ends this life of the engine."""

    def execute_dummy(self, cache: Any) -> None:
        """Take part in a step of other ranks without work of one's own, where that is needed.

        Called, as `execute` is, between two steps of an engine whose group steps together. Ranks of
        a model that exchange nothing within a step have nothing to do.
        """


class EngineLoad(Protocol):
    """What a client knows of one engine: own exact counts, and the newest snapshot.

    It changes as the client goes on: copy what you want to keep. A snapshot is old by up to the
    publish interval.
    """

    @property
    def engine(self) -> EngineId:
        """Which incarnation."""

    @property
    def inflight(self) -> int:
        """This client's unfinished requests."""

    @property
    def tokens(self) -> int:
        """Tokens of those requests: of each its prompt, and half of its `max_tokens`."""

    @property
    def waiting(self) -> int:
        """Waiting requests of all clients, from the newest snapshot, bumps since then included."""

    @property
    def running(self) -> int:
        """Running requests of all clients, from the newest snapshot."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, from the newest snapshot."""

    @property
    def others(self) -> int:
        """Requests of other clients: what the newest snapshot counts beyond this client's own."""

    @property
    def room(self) -> Room | None:
        """What the engine can hold and do at once; None: unknown."""

    @property
    def report(self) -> StepReport | None:
        """The engine's own newest word to this client; None: it has said nothing, or never does."""


class LoadView(Protocol):
    """What a policy may look at: engines by index, and what this client knows of each.

    Only engines that may be picked are in it; when one comes or goes, indices move.
    """

    client_index: int
    client_count: int

    steps_together: bool
    """Whether the engines step together, so that each waits for the slowest."""

    changes: set[int]
    """Engines whose load has changed. For a policy that keeps what it made of the loads: it takes
    the indices and clears the set. At first, and when an engine came or went, all are in it."""

    @property
    def engines(self) -> Sequence[EngineId]:
        """The incarnations that may be picked."""

    @property
    def loads(self) -> Sequence[EngineLoad]:
        """All that is known, by engine."""

    @property
    def names(self) -> Collection[str]:
        """Of all engines there are, those that are away for a while among them."""

    @property
    def inflight(self) -> Sequence[int]:
        """This client's unfinished requests on each engine; a copy, so ask once per pick."""

    @property
    def waiting(self) -> Sequence[int]:
        """Waiting requests of all clients on each engine; a copy."""

    @property
    def running(self) -> Sequence[int]:
        """Running requests of all clients on each engine; a copy."""

    @property
    def kv_cache_usage(self) -> Sequence[float]:
        """Share of KV blocks in use on each engine; a copy."""

    def load(self, index: int) -> EngineLoad:
        """All that is known of one engine."""

    def bump_waiting(self, index: int, requests: int) -> None:
        """Count `requests` more as waiting on an engine until the next snapshot says better."""


@frozen(kw_only=True)
class End:
    """How a request left its engine."""

    output: Sequence[int] = ()
    """All its tokens so far, those of earlier lives included."""

    finished: bool = False
    """The model ended it; else it was aborted, lost or refused."""


class Policy(abc.ABC):
    """Chooses an engine. Synchronous, no I/O, no clock; owned by one client's dispatch.

    `pick` is followed at once by `on_charge` with the same index: no other call comes between.
    It is asked only when there is an engine to pick.
    """

    @abc.abstractmethod
    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        """Index of the engine for `request`."""

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float | None:
        """What `pick` compares, for whoever asks why; None: this policy does not score."""
        return None

    def scores(self, request: GenerateRequest, view: LoadView) -> Sequence[float] | None:
        """Likewise of all engines; it is kept, so it must not change. None: not worth its cost."""
        return None

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """A request was charged to engine `index`; a pinned one too: `request.engine` is set."""

    def on_release(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """A charged request ended, whichever way; `index` is where its engine is now.

        Not called for an engine that left the view meanwhile: what it held is no longer counted.
        """

    def on_answered(self, request: GenerateRequest, view: LoadView) -> None:
        """A charged request has its first token."""

    def on_end(self, request: GenerateRequest, end: End, view: LoadView) -> None:
        """A charged request is on its engine no more, be that in the view or not."""

    def on_engines(self, view: LoadView) -> None:
        """An engine came or went, perhaps for good: indices have moved, and there may be none."""

    def on_snapshot(self, view: LoadView) -> None:
        """A new snapshot replaced the old one."""

    def on_report(self, index: int, view: LoadView) -> None:
        """Engine `index` has told of its work: `view.load(index).report` is new.

        After every step, so it must be cheap. Only a policy that overrides it has `view.changes`
        tell of reports.
        """


class Pass(Protocol):
    """One look of a `HoldingPolicy` at all engines, while it decides on the requests that wait.

    What was offered counts for what is offered after it: both where it is sent and where it is held
    an engine has that much more to do.
    """

    @property
    def is_over(self) -> bool:
        """No engine takes any more: whoever was not offered yet waits."""

    def offer(self, prospect: Any, index: int | None = None) -> int | None:
        """Decide on one request: the engine to send it to at once; None: it is to wait on.

        Args:
            prospect: What `prepare` made of it.
            index: The engine that it is pinned to; None: it may go anywhere.
        """


class HoldingPolicy(Policy):
    """A policy that may also keep a request at the client until its engine can begin it.

    For late binding. A request that is held is held for nobody but itself: the next pass may decide
    anything else. Bound early it is a policy like any other.
    """

    @abc.abstractmethod
    def prepare(self, request: GenerateRequest) -> Any:
        """What `offer` wants to know of a request; made once and kept while the request waits."""

    @abc.abstractmethod
    def age(self, prospect: Any) -> float:
        """Seconds by which those that come later may go before this request."""

    @abc.abstractmethod
    def open_pass(self, view: LoadView) -> Pass:
        """Begin to decide on those that wait, in the order of their turn.

        A request that is offered and may be sent is charged at once, before the next is offered.
        """


class EngineLink(Protocol):
    """One engine as its client sees it. All calls are synchronous and never block."""

    engine: EngineId

    def submit(self, request: GenerateRequest) -> None:
        """Hand a request over; its outputs come back through the client's `deliver`."""

    def abort(self, request_id: str) -> None:
        """Ask the engine to drop a request; unknown ids are ignored."""

    def take_back(
        self, request_ids: Sequence[str], on_taken: Callable[[EngineId, Sequence[str]], object]
    ) -> None:
        """Ask for requests that the engine does not run: not begun, or preempted.

        `on_taken` is called once, perhaps before this returns, with those that it has given up,
        in the order of the asking: all their outputs have come by then, and no more will. The
        others stay where they are. If the engine is lost before it has answered, requests hear of
        that, and `on_taken` nothing.
        """


class Worker(Protocol):
    """A process that a launcher started. It is gone when its block is left."""

    @property
    def name(self) -> str:
        """Who it is, in logs and errors."""

    @property
    def pid(self) -> int:
        """Its process id, which is its process group and session too."""

    @property
    def status(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it lives."""

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines that it wrote to stdout and stderr; whole once there is a `status`."""

    async def wait(self) -> int:
        """Wait for its `status`, which comes at once when it ends."""

    def send_signal(self, signum: int) -> None:
        """Signal it, and only it; nothing happens if it has ended."""

    def kill(self) -> None:
        """End it at once, and all that it started."""


class Launcher(Protocol):
    """Starts workers. The state that they work with is prepared before, as the launcher was told.

    Nothing of a worker is left, in whatever session, once its block is left or this process killed.
    """

    def open_worker(
        self, work: str, args: Mapping[str, Any] | None = None, *, name: str, grace: float = 5.0
    ) -> AbstractAsyncContextManager[Worker]:
        """Start a process that runs ``work(state, **args)``, in a session of its own.

        Args:
            work: ``"pkg.mod:function"``.
            args: what JSON can carry.
            name: who it is, in logs and errors.
            grace: Seconds from SIGTERM to SIGKILL, when the block is left while it runs.

        Raises:
            DpkitError: as the code that prepares raised it.
            LaunchFailed: it raised something else, `work` is not there, or no process came up.
        """
