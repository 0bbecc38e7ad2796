"""One of the answers that a request asked for: the sink of one submission.

What each step adds is taken here, as text and as log-probabilities; what becomes of it is for its
`Owner` to decide. Waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dpkit.names import FinishReason
from dpkit.serve.chunks import Kind, encode
from dpkit.serve.errors import ApiError
from dpkit.serve.logprobs import of_chat, of_completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import EngineOutput, TokenLogprob
    from dpkit.nursery.submission import Submission
    from dpkit.serve.chunks import Form
    from dpkit.serve.face import Responder
    from dpkit.serve.logprobs import Spelling
    from dpkit.serve.requests import Order

_GOOD = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Owner(Protocol):
    """The answer that a choice belongs to."""

    order: Order
    form: Form
    spelling: Spelling
    responder: Responder

    def advance(self, choice: Choice) -> None:
        """A choice has more, or has ended."""

    def fail(self, error: Exception) -> None:
        """Nothing more will come of any choice."""


class Choice:
    """Takes the outputs of one submission.

    Args:
        owner: The answer that it belongs to.
        index: Which of its choices.
        prompt_token_ids: Of its prompt.
        prompt_text: To be repeated in front of it.
    """

    def __init__(
        self, owner: Owner, index: int, prompt_token_ids: Sequence[int], prompt_text: str
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.submission: Submission | None = None
        self.finish_reason: str | None = None
        """In OpenAI's words; None: it goes on."""
        self.is_open = False
        """Whether its first piece is out, in a stream."""
        self._owner = owner
        self._prefix = prompt_text
        self._without_output = owner.order.without_output
        self._tells = owner.order.sampling.logprobs is not None
        self._told: list[TokenLogprob | None] = []
        self._told_ids: list[int] = []
        self._offset = 0  # characters that logprobs were told of
        if self._tells and owner.order.echo:
            self._told.append(None)  # nothing comes before the first token
            self._told_ids.append(prompt_token_ids[0])

    @property
    def tokens(self) -> int:
        """How many were generated so far, for the client to know."""
        if self.submission is None or self._without_output:
            return 0
        return len(self.submission.delivered)

    @property
    def cached_tokens(self) -> int | None:
        """How many tokens of its prompt were found in a cache; None: nobody has said."""
        return None if self.submission is None else self.submission.cached_tokens

    def __call__(self, output: EngineOutput) -> None:
        """Take what a step adds."""
        if self._tells:
            self._take_told(output.prompt_logprobs)
            self._take_told(() if self._without_output else output.logprobs)
        reason = output.finish_reason
        if reason is not None:
            self.finish_reason = "length" if self._without_output else _GOOD.get(reason)
        if output.error is not None:
            self._owner.fail(output.error)
        elif reason is not None and reason not in _GOOD:
            self._owner.fail(ApiError(503, "the engine gave this up", retry_after=1))
        else:
            self._owner.advance(self)

    def _take_told(self, told: Sequence[TokenLogprob]) -> None:
        self._told += told
        self._told_ids += [each.token_id for each in told]

    def take_text(self) -> str:
        """New text, the prompt's before the first.

        Raises:
            What the model's tokenizer raises.
        """
        text = "" if self.submission is None else self.submission.take_text()
        if self._without_output:
            text = ""
        if self._prefix:
            text, self._prefix = self._prefix + text, ""
        return text

    @property
    def has_logprobs(self) -> bool:
        """Whether there are some to take."""
        return bool(self._told)

    def take_logprobs(self) -> dict[str, Any] | None:
        """Those of new tokens, in the form that was asked for; None if none were asked for."""
        if not self._tells:
            return None
        told, self._told = self._told, []
        token_ids, self._told_ids = self._told_ids, []
        spelling = self._owner.spelling
        if self._owner.form.kind is Kind.CHAT:
            return of_chat(spelling, [each for each in told if each is not None])
        fields, self._offset = of_completion(spelling, told, token_ids, self._offset)
        return fields


class StreamedChoice(Choice):
    """Takes the common case by the shortest way: a token, its text, the template, the socket."""

    def __init__(
        self, owner: Owner, index: int, prompt_token_ids: Sequence[int], prompt_text: str
    ) -> None:
        super().__init__(owner, index, prompt_token_ids, prompt_text)
        self._before, self._after = owner.form.template(index)
        self._plain = not (self._tells or self._without_output or owner.order.running_usage)

    def __call__(self, output: EngineOutput) -> None:
        """Take what a step adds, and send it on if that is simple."""
        simple = self.is_open and self._plain and output.finish_reason is None
        if not simple or self._owner.responder.congested or self.submission is None:
            super().__call__(output)
            return
        try:
            text = self.submission.take_text()
        except Exception as error:  # noqa: BLE001 - the tokenizer's, whatever it raises
            self._owner.fail(error)
            return
        if text:
            self._owner.responder.write(self._before + encode(text) + self._after)
