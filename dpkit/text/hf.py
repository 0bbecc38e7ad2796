"""A tokenizer made from tokenizer.json, with incremental decoding.

Knows the `tokenizers` library and nothing of files: where the JSON came from is the caller's
affair. Chat templates are `dpkit.text.chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

import tokenizers

from dpkit.errors import ModelUnsupported, RequestRejected, describe
from dpkit.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most four bytes, so at most three tokens of it can be waiting for the
# last one; a decoder shows each as one replacement character, or all as one.
_MOST_HELD = 3

# Tokens decoded again at each step: those that may be waiting, and as many before them, because
# some decoders treat the first token of a sequence apart.
_WINDOW = 2 * _MOST_HELD

# Characters from which on a text is encoded as a batch of one: with that the library lets other
# threads run meanwhile, which `encode` does not (0.23): a megabyte takes a second.
_LONG = 16 * 1024

# Tokens of a prompt among which a window of those that have text is looked for.
_LOOK_BACK = 4 * _WINDOW


class HfTokenizer:
    """Text to token ids and back as the model was trained with it.

    Raises:
        ModelUnsupported: the tokenizer or the chat template is damaged; `where` begins the message.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        where: str = "this model",
    ) -> None:
        self._tokenizer = _parse(tokenizer_json, where)
        self._template = chat_template and ChatTemplate(chat_template, special_tokens, where=where)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of `text`, with a first token where the tokenizer itself adds one."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> Sequence[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            RequestRejected: the model has no chat template, or it refuses these messages.
        """
        if not self._template:
            raise RequestRejected("this model has no chat template; send the prompt as plain text")
        text = self._template.render(messages)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        if len(text) < _LONG:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return LongIds(encoding)

    def decoder(self, prompt_token_ids: Sequence[int] = ()) -> HfDecoder:
        """Make a fresh decoder for what follows these tokens: no first space is lost there."""
        return HfDecoder(self._tokenizer, self._special, prompt_token_ids)


class LongIds(Sequence[int]):
    """Token ids of a long text. Their number is known before there is a list of them.

    A million take 0.1 s to make, and nothing else runs meanwhile: too long for a mere refusal.
    """

    def __init__(self, encoding: tokenizers.Encoding) -> None:
        self._encoding = encoding

    def __repr__(self) -> str:
        return f"<LongIds: {len(self)} tokens>"

    def __len__(self) -> int:
        return len(self._encoding)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._ids[index]

    @cached_property
    def _ids(self) -> list[int]:
        ids: list[int] = self._encoding.ids
        return ids


class HfDecoder:
    """Turns tokens that arrive one by one into text; special tokens have none.

    Remembers the last few tokens and how much of their text is out, so a step costs the same
    however long the answer is. A replacement character at the end may become another character
    with the next token and is held back.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._recent = self._with_text(prompt_token_ids[-_LOOK_BACK:])[-_WINDOW:]
        self._sent = len(self._text(self._recent))  # characters of `_recent` that are out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain."""
        tokens = [*self._recent, *self._with_text(token_ids)]
        text = self._text(tokens)
        # What is out stays out: the window may begin inside a character, which then looks like
        # one that waits for its end.
        certain = max(self._sent, _certain(text))
        new, held = text[self._sent : certain], len(text) - certain
        self._recent = tokens[-_WINDOW:]
        self._sent = len(self._text(self._recent)) - held
        return new

    def finish(self) -> str:
        """Return what was held back, which now is no whole character any more."""
        return self._text(self._recent)[self._sent :]

    def _with_text(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id not in self._special]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _parse(tokenizer_json: str, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except BaseException as error:
        # The library raises bare exceptions, and where it panics one that is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelUnsupported(
            f"{where}: tokenizer.json is damaged, or of a kind that the installed tokenizers does "
            f"not know: {describe(error)}"
        ) from error


def _certain(text: str) -> int:
    """How many characters of `text` no further token can change."""
    held = 0
    while held < min(_MOST_HELD, len(text)) and text[-1 - held] == _UNKNOWN:
        held += 1
    return len(text) - held
