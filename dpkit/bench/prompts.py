"""Prompts of a wanted length that share nothing but what they are to share.

A prompt is a slice, from a random place, of one long random sequence of pieces: token ids where a
server takes them, words otherwise. That costs microseconds, however long it is, and two prompts
begin alike only if they begin at one place. Knows no server.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXT = """
    the of and to in is that for it as was with be by on not he his but at are this have from
    or had an they which one you were all her she there would their we him been has when who
    will no more if out so up said what its about than into them can only other time new some
    could these two may first then do any like my now over such our man me even most made
    after also did many before must well back through years where much your way down should
    because long each just state those people too good work day life water house school night
    world river stone paper music light garden window summer winter morning letter number
"""

WORDS = tuple(_TEXT.split())
"""Common English ones: with a space before it, each is one token to most tokenizers."""

_SEQUENCE = 1 << 18  # pieces: far more places to begin at than requests in a run


@frozen(kw_only=True)
class Prompt:
    """What is asked: one of the two."""

    tokens: int  # as wanted; a text has about so many
    ids: tuple[int, ...] | None = None
    text: str | None = None


class PromptMaker:
    """Makes prompts; the same ones from the same seed.

    Args:
        pieces: What they consist of: token ids, or words. At least two different ones.
        pieces_per_token: 1 for token ids; of words, so many make one token.
        seed: Of all choices.
        prefix: Tokens with which every prompt begins, the same for all; they are part of its
            length, and one token of each prompt is always its own.
    """

    def __init__(
        self,
        pieces: Sequence[int] | Sequence[str],
        *,
        pieces_per_token: float = 1.0,
        seed: int = 0,
        prefix: int = 0,
    ) -> None:
        self._rng = random.Random(f"prompts {seed}")  # noqa: S311 - load, not secrets
        self._sequence: list[int | str] = self._rng.choices(pieces, k=_SEQUENCE)
        self._are_ids = isinstance(pieces[0], int)
        self._per_token = pieces_per_token
        self._seed = seed
        self._prefix = prefix

    def make(self, tokens: int, blocks: Sequence[int] = ()) -> Prompt:
        """Make a prompt.

        Args:
            tokens: Its length.
            blocks: Ids of the blocks that it begins with, of a trace; the same id is the same text.
        """
        shared = min(self._prefix, tokens - 1)
        parts = [(0, shared)] * bool(shared)
        left = tokens - shared
        for block in blocks:
            if left > 0:
                parts.append((self._place(block), min(left, BLOCK_TOKENS)))
                left -= BLOCK_TOKENS
        if left > 0:
            parts.append((self._rng.randrange(_SEQUENCE), left))
        return self._prompt(tokens, parts)

    def _place(self, block: int) -> int:
        return random.Random(f"block {self._seed} {block}").randrange(_SEQUENCE)  # noqa: S311

    def _prompt(self, tokens: int, parts: Sequence[tuple[int, int]]) -> Prompt:
        pieces: list[int | str] = []
        for place, length in parts:
            pieces += self._slice(place, max(1, round(length * self._per_token)))
        if self._are_ids:
            return Prompt(tokens=tokens, ids=tuple(map(int, pieces)))
        return Prompt(tokens=tokens, text=" ".join(map(str, pieces)))

    def _slice(self, place: int, count: int) -> list[int | str]:
        pieces = self._sequence[place : place + count]
        while len(pieces) < count:  # it goes round
            pieces += self._sequence[: count - len(pieces)]
        return pieces
