"""Prompts of a given length that share exactly the prefixes that a trace says they share.

A block id stands for one token, repeated: two prompts have equal blocks in any prefix cache as far
as their ids are equal, whatever the size of the cache's own blocks. Prompts are made when they are
due and dropped when they are done, since a hundred thousand tokens take a megabyte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.traces import BLOCK_IDS, BLOCK_TOKENS

if TYPE_CHECKING:
    from dpkit.traces import Ask

_OWN = BLOCK_IDS
"""Tokens from here on are one prompt's alone."""


def prompt_of(ask: Ask, number: int) -> tuple[int, ...]:
    """Token ids of request `number` of a trace."""
    length, blocks = ask.prompt_tokens, ask.blocks
    if not blocks:
        return (_OWN + number,) * length
    token_ids: list[int] = []
    for block in blocks[: -(-length // BLOCK_TOKENS)]:
        token_ids += [block] * BLOCK_TOKENS
    token_ids += [_OWN + number] * (length - len(token_ids))
    return tuple(token_ids[:length])
