"""The answer to one request while it is generated: tokens in, HTTP out, and no task woken for one.

`Streamed` writes what each step adds into the response at once, or as much as there is when the
client has taken what came before; `Whole` keeps it to the end. Both end as soon as one of their
choices fails. Neither waits: the task that owns an answer sleeps until it is `done`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import trio

from dpkit.errors import ClusterClosed, Draining, RequestRejected
from dpkit.serve.choices import Choice, StreamedChoice
from dpkit.serve.chunks import Kind, Usage, error_event
from dpkit.serve.errors import api_error, cut_off
from dpkit.serve.face import Ending
from dpkit.serve.heads import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.serve.chunks import Form
    from dpkit.serve.errors import ApiError
    from dpkit.serve.face import Headers, Responder
    from dpkit.serve.logprobs import Spelling
    from dpkit.serve.requests import Order

    MakeHeaders = Callable[["Answer"], Headers]

_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the pieces
)


class Answer(ABC):
    """All that one request gets.

    Args:
        responder: Where it goes.
        order: What was asked for.
        form: How it is written.
        spelling: Texts of single tokens.
        headers: Makes those of a good answer, once it has begun.
        longest: Tokens that a prompt and its answer may have together.
    """

    choice_class: ClassVar[type[Choice]] = Choice

    def __init__(
        self,
        responder: Responder,
        *,
        order: Order,
        form: Form,
        spelling: Spelling,
        headers: MakeHeaders,
        longest: int,
    ) -> None:
        self.responder = responder
        self.order = order
        self.form = form
        self.spelling = spelling
        self.choices: list[Choice] = []
        self.done = trio.Event()
        self.error: Exception | None = None
        self.began_at: float | None = None
        """When the first token came, on Trio's clock."""
        self.longest = longest
        self._headers = headers
        self._open = 0

    def add(self, prompt_token_ids: Sequence[int], prompt_text: str = "") -> Sequence[Choice]:
        """Make the choices of one prompt; the caller submits a request for each."""
        first, make = len(self.choices), self.choice_class
        made = [
            make(self, first + number, prompt_token_ids, prompt_text)
            for number in range(self.order.n)
        ]
        self.choices += made
        self._open += len(made)
        return made

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        prompts = self.choices[:: self.order.n]
        return Usage(
            prompt=sum(len(each.prompt_token_ids) for each in prompts),
            completion=sum(each.tokens for each in self.choices),
            cached=_cached(prompts),
        )

    def advance(self, choice: Choice) -> None:
        """As `Owner` says."""
        if self.began_at is None:
            self.began_at = trio.current_time()
        if not self.done.is_set():
            try:
                self._advance(choice)
            except Exception as error:  # noqa: BLE001 - the tokenizer's, whatever it raises
                self.fail(error)

    @abstractmethod
    def _advance(self, choice: Choice) -> None:
        """Take note of what a choice has, and say what is to be said."""

    def fail(self, error: Exception) -> None:
        """As `Owner` says. What was begun ends with an event that says why."""
        if self.done.is_set():
            return
        self.error = error
        self.done.set()
        told = self._told(error)
        if self.responder.status is None:
            told.answer(self.responder)
        else:
            self.responder.write(self._left() + error_event(told.fields))
            stops = isinstance(error, (ClusterClosed, Draining))
            self.responder.finish(Ending.SHUTDOWN if stops else Ending.ERROR)
        self.close()

    def _told(self, error: Exception) -> ApiError:
        """What the client hears. The cluster's own words are for requests that come too late."""
        tokens = self.usage.completion
        if isinstance(error, Draining):
            return cut_off(tokens, code="draining", retry_after=error.retry_after)
        if isinstance(error, ClusterClosed):
            return cut_off(tokens)
        param = self._wrong_field() if isinstance(error, RequestRejected) else None
        return api_error(error, self.form.id, param)

    def _wrong_field(self) -> str | None:
        """The field for which the request is refused: what cannot be read, or is too long."""
        length = max((len(each.prompt_token_ids) for each in self.choices), default=self.longest)
        if length >= self.longest:
            return "messages" if self.form.kind is Kind.CHAT else "prompt"
        if length + (self.order.max_tokens or 0) > self.longest:
            return self.order.max_tokens_field
        return None

    def _left(self) -> bytes:
        """What has come, and was not said yet."""
        return b""

    def close(self) -> None:
        """Let the engines be, whatever of this they have. Idempotent."""
        for choice in self.choices:
            if choice.submission is not None:
                choice.submission.close()

    def let_go(self) -> None:
        """Forget what leads back to this: it is told, and may go without the garbage collector."""
        self.choices.clear()
        self.error = None


def _cached(prompts: Sequence[Choice]) -> int | None:
    """Tokens of all prompts that were found in a cache; None: of one it is not known."""
    told = [each.cached_tokens for each in prompts]
    known = [count for count in told if count is not None]
    return sum(known) if known and len(known) == len(told) else None


class Whole(Answer):
    """An answer in one piece, when all of it is there."""

    def _advance(self, choice: Choice) -> None:
        if choice.finish_reason is None:
            return
        self._open -= 1
        if not self._open:
            body = self.form.whole([self._written(each) for each in self.choices], self.usage)
            self.responder.respond(200, (JSON, *self._headers(self)), body)
            self.done.set()

    def _written(self, choice: Choice) -> dict[str, Any]:
        text, logprobs = choice.take_text(), choice.take_logprobs()
        return self.form.choice(choice.index, text, choice.finish_reason or "", logprobs)


class Streamed(Answer):
    """An answer in pieces, as they come.

    The head goes out with the first of them: until then a failure is an error with its own status.
    """

    choice_class = StreamedChoice

    def __init__(self, responder: Responder, **parts: Any) -> None:
        super().__init__(responder, **parts)
        self._held: dict[int, Choice] = {}

    def let_go(self) -> None:
        """As for every answer, and what its client never took."""
        super().let_go()
        self._held.clear()

    def _advance(self, choice: Choice) -> None:
        if self.responder.status is None or not self.responder.congested:
            self._say(choice)
            return
        if not self._held:
            self.responder.when_drained(self._resume)
        self._held[choice.index] = choice

    def _resume(self) -> None:
        """Say all that has come while the client did not read."""
        held, self._held = self._held, {}
        for choice in held.values():
            self.advance(choice)

    def _say(self, choice: Choice) -> None:
        piece = self._piece(choice)
        if choice.finish_reason is not None:
            self._open -= 1
            piece += b"" if self._open else self.form.ending(self.usage)
        if self.responder.status is None:
            self.responder.start(200, (*_EVENTS, *self._headers(self)), piece)
        else:
            self.responder.write(piece)
        if not self._open:
            self.responder.finish()
            self.done.set()

    def _piece(self, choice: Choice) -> bytes:
        """What is new of a choice; empty if no text has become certain."""
        opening = b"" if choice.is_open else self.form.opening(choice.index)
        choice.is_open = True
        text = choice.take_text()
        if not (text or choice.has_logprobs or choice.finish_reason):
            return opening
        return opening + self.form.piece(
            choice.index,
            text,
            logprobs=choice.take_logprobs(),
            finish_reason=choice.finish_reason,
            usage=self.usage if self.order.running_usage else None,
        )

    def _left(self) -> bytes:
        left = b""
        for choice in self._held.values():
            choice.finish_reason = None
            with suppress(Exception):  # the one that failed, perhaps, because it cannot be read
                left += self._piece(choice)
        return left
