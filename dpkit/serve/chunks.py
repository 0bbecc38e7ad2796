"""What answers look like on the wire: the pieces of a stream, and whole answers.

A piece differs from the one before it in its text alone, so each stream has a template into which
the text is put: a twentieth of what it costs to write the whole as JSON. Knows no engine.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DONE = b"data: [DONE]\n\n"
"""The end of a stream that is complete."""

encode = msgspec.json.Encoder().encode


class Kind(StrEnum):
    """What was asked for: text that goes on, or an answer in a conversation."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


@frozen(kw_only=True)
class Usage:
    """Tokens of a request, of all its answers together."""

    prompt: int
    completion: int
    cached: int | None = None
    """Of the prompt, those found in a cache; None: nobody said."""

    @property
    def fields(self) -> dict[str, Any]:
        """As clients know it."""
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }
        if self.cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return told


@define(kw_only=True, eq=False)
class Form:
    """How the answer to one request is written.

    Args:
        kind: What was asked for.
        id: Of the answer.
        model: Its name, as it was asked for.
        usage: Whether a stream tells the usage at its end.
    """

    kind: Kind
    id: str
    model: str
    usage: bool = False
    created: int = field(factory=lambda: int(time.time()), init=False)
    _head: bytes = field(init=False)
    _no_usage: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        streamed = {Kind.COMPLETION: "text_completion", Kind.CHAT: "chat.completion.chunk"}
        self._head = b"data: " + encode(self._top(streamed[self.kind]))[:-1] + b',"choices":['
        self._no_usage = b',"usage":null}\n\n' if self.usage else b"}\n\n"

    def _top(self, what: str) -> dict[str, Any]:
        return {"id": self.id, "object": what, "created": self.created, "model": self.model}

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What comes before and after the text, as JSON, of a piece in the midst of an answer."""
        return self._before(index), self._after(b"null", b"null") + self._no_usage

    def piece(
        self,
        index: int,
        text: str,
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Any piece of an answer's stream.

        Args:
            index: Of the answer.
            text: New text.
            logprobs: Of new tokens.
            finish_reason: Of the last piece.
            usage: So far, for those who want to know all the time.
        """
        end = self._no_usage if usage is None else b',"usage":%b}\n\n' % encode(usage.fields)
        after = self._after(encode(logprobs), encode(finish_reason))
        return self._before(index) + encode(text) + after + end

    def _before(self, index: int) -> bytes:
        key = b'"text":' if self.kind is Kind.COMPLETION else b'"delta":{"content":'
        return self._head + b'{"index":%d,' % index + key

    def _after(self, logprobs: bytes, finish_reason: bytes) -> bytes:
        close = b"" if self.kind is Kind.COMPLETION else b"}"
        return close + b',"logprobs":%b,"finish_reason":%b}]' % (logprobs, finish_reason)

    def opening(self, index: int) -> bytes:
        """What comes before an answer's first text: who speaks. Completions have none."""
        if self.kind is Kind.COMPLETION:
            return b""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._head + b'{"index":%d,' % index + delta + self._no_usage

    def ending(self, usage: Usage) -> bytes:
        """What comes after all answers."""
        if not self.usage:
            return DONE
        return self._head + b'],"usage":%b}\n\n' % encode(usage.fields) + DONE

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """An answer in one piece."""
        whole = {Kind.COMPLETION: "text_completion", Kind.CHAT: "chat.completion"}
        return encode({**self._top(whole[self.kind]), "choices": choices, "usage": usage.fields})

    def choice(
        self, index: int, text: str, finish_reason: str, logprobs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """One of those of an answer in one piece."""
        said: dict[str, Any] = {"text": text}
        if self.kind is Kind.CHAT:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}


def error_event(fields: Mapping[str, Any]) -> bytes:
    """Why a stream ends before its time. No `DONE` follows."""
    return b"data: %b\n\n" % encode({"error": fields})
