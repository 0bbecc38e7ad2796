"""Prompts of every kind become token ids, and what cannot be one is refused in words.

All that a tokenizer is given or gives passes through here: a prompt that it chokes on is refused
alone and never reaches an engine. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from dpkit.errors import RequestRejected, describe
from dpkit.sampling import MOST_TOKENS, shown
from dpkit.text.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.abc import TextDecoder, Tokenizer

    Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class _TokenIds(Struct, array_like=True):
    token_ids: tuple[Annotated[int, Meta(ge=0, le=MOST_TOKENS)], ...]


_MOST_CHARACTERS = 256
"""Of one token: the longest in the vocabularies of Llama 3, Qwen and GPT-4 are 128 blanks."""

_KINDS = "a prompt is text, token ids, or chat messages with role and content"


class Encoder:
    """One tokenizer behind checks; every method raises `RequestRejected` and nothing else.

    Args:
        tokenizer: Of a model.
        vocab_size: Above the model's token ids; it has no text for others.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = MOST_TOKENS + 1) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def encode(self, prompt: Prompt, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a prompt.

        Ids may be any whole numbers that index a list, NumPy's too, but no booleans. Whether they
        are in the vocabulary is for the engine to say, which knows its model.

        Args:
            prompt: Of whichever kind.
            most: Tokens that it may have, so that no time is spent on more; None: any number.
        """
        if isinstance(prompt, str):
            _refuse_long(len(prompt), most)
            _refuse_surrogates(prompt)
            with _tokenizing():
                return _whole(self._tokenizer.encode(prompt), most)
        items = _items(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            messages = [_message(item) for item in items]
            _refuse_long(sum(len(message["content"]) for message in messages), most)
            with _tokenizing():
                return _whole(self._tokenizer.encode_chat(messages), most)
        return _whole(items, most)

    def text(self, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
        """The prompt as it was given, or what its tokens say."""
        return prompt if isinstance(prompt, str) else self._text(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """What tokens say that begin a text."""
        token_ids = _whole(token_ids)
        if token_ids and (largest := max(token_ids)) >= self._vocab_size:
            last, place = self._vocab_size - 1, token_ids.index(largest)
            raise RequestRejected(
                f"token ids must be 0 to {last}, not {largest} (at index {place})"
            )
        return self._text(token_ids)

    def _text(self, token_ids: tuple[int, ...]) -> str:
        with _tokenizing():
            return Transcript(self._tokenizer.decoder()).feed(token_ids, last=True)

    def spell(self, token_id: int) -> str:
        """What one token says in the midst of a text."""
        with _tokenizing():
            decoder = self._tokenizer.decoder((token_id,))  # as the first it may lose a blank
            return decoder.feed((token_id,)) + decoder.finish()

    def decoder(self, token_ids: tuple[int, ...]) -> TextDecoder:
        """Make a fresh decoder for what follows these tokens."""
        try:
            return self._tokenizer.decoder(token_ids)
        except RequestRejected:
            raise
        except Exception as error:  # no `with`: it costs more than most decoders
            raise _refusal(error) from error


@contextmanager
def _tokenizing() -> Iterator[None]:
    try:
        yield
    except RequestRejected:
        raise
    except Exception as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> RequestRejected:
    return RequestRejected(f"the model's tokenizer cannot take this prompt: {describe(error)}")


def _items(prompt: Any) -> tuple[Any, ...]:
    """What a sequence holds. An iterator, a set, a mapping or bytes is no prompt."""
    no_prompt = isinstance(prompt, (bytes, bytearray, memoryview, Mapping))
    if no_prompt or not (hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")):
        raise RequestRejected(f"{_KINDS}, not {shown(prompt)}")
    try:
        return tuple(prompt)
    except Exception as error:  # a NumPy array without a dimension, a sequence of somebody else's
        raise RequestRejected(f"{_KINDS}, not {shown(prompt)}: {error}") from error


def _refuse_long(characters: int, most: int | None) -> None:
    """Refuse a text that has too many tokens, whatever they are: tokenizing may take a minute."""
    if most is not None and characters > _MOST_CHARACTERS * most:
        raise RequestRejected(
            f"cannot serve request: a prompt of {characters} characters has more than the {most} "
            "tokens that there is room for"
        )


def too_many(tokens: int, most: int) -> str:
    """What is said of a prompt that no engine has room for."""
    return (
        f"cannot serve request: {tokens} prompt tokens are {tokens - most} more than the {most} "
        "that there is room for"
    )


def _whole(items: Any, most: int | None = None) -> tuple[int, ...]:
    if most is not None and len(items) > most:
        raise RequestRejected(too_many(len(items), most))
    token_ids = tuple(items)
    try:
        # Four times as fast as to look at each here, and prompts are long.
        return convert((token_ids,), _TokenIds).token_ids
    except ValidationError:
        token_ids = tuple(map(_index, token_ids))
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id <= MOST_TOKENS:
            wrong = f"{shown(token_id)} (at index {place})"
            raise RequestRejected(f"token ids must be 0 or more, in 31 bits, not {wrong}")
    return token_ids


def _index(item: Any) -> int:
    if not isinstance(item, bool):
        try:
            return index(item)
        except Exception:  # noqa: BLE001, S110 - whatever it is, it is refused below
            pass
    raise RequestRejected(f"{_KINDS}; it has {shown(item)} where a token id should be")


def _message(item: Mapping[Any, Any]) -> dict[str, str]:
    message = dict(item)
    for key in ("role", "content"):
        if not isinstance(value := message.get(key), str):
            raise RequestRejected(
                f"a chat message needs {key!r} as text, not {shown(value)}"
                if key in message
                else f"a chat message has no {key!r}: {shown(message)}"
            )
        _refuse_surrogates(value)
    return message


def _refuse_surrogates(text: str) -> None:
    """Refuse half of a UTF-16 pair: no UTF-8, so no tokenizer was made for it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejected(
            f"the prompt is no Unicode text: half of a surrogate pair at character {error.start}; "
            "it was most likely decoded from bytes that are not UTF-8"
        ) from None
