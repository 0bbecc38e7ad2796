"""The tokenizer that needs no files: one token a UTF-8 byte, and one for the end.

For models that compute nothing (echo, cost) and for tests: every text has exactly one encoding, and
a token may be a quarter of a character, which is the worst an incremental decoder can meet.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS_TOKEN_ID = 256  # the first id that is not a byte
VOCAB_SIZE = 257

_AT_ONCE = 64 * 1024


class ByteDecoder:
    """Turns bytes that arrive one by one into whole characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the characters that are complete now; ids above 255 have no text."""
        return self._utf8.decode(bytes([t for t in token_ids if t < EOS_TOKEN_ID]))

    def finish(self) -> str:
        """Return a replacement character for half a character left over, else nothing."""
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    """Token ids 0 to 255 are bytes of UTF-8, 256 ends the text."""

    def encode(self, text: str) -> list[int]:
        """Bytes of `text`; what UTF-8 cannot hold (a lone surrogate) becomes a question mark."""
        data = text.encode("utf-8", "replace")
        ids: list[int] = []
        for start in range(0, len(data), _AT_ONCE):  # between two of which other threads may run
            ids += data[start : start + _AT_ONCE]
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode a line `role: content` for each message, then `assistant: ` to be continued."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decoder(self, prompt_token_ids: Sequence[int] = ()) -> ByteDecoder:  # noqa: ARG002
        """Make a fresh decoder; what came before changes no byte."""
        return ByteDecoder()
