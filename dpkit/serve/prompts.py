"""The prompts of a completion: JSON as it came until they are known to be no longer than can be.

Millions of numbers take a second to read and to let go of, during which no other thread of the
process runs. To count them takes a twentieth of that. Knows no model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from dpkit.nursery.prompts import too_many
from dpkit.sampling import MOST_TOKENS, shown
from dpkit.serve.decoding import decode_body
from dpkit.serve.errors import bad_request

if TYPE_CHECKING:
    from dpkit.nursery.prompts import Prompt

MOST_ANSWERS = 1024
"""Answers that one request may ask for: its prompts times `n`."""

_AT_ONCE = 64 * 1024
"""Bytes that are read without a look: half a millisecond."""

_TOKENS = re.compile(rb"\s*\[\s*-?\d")
_ROWS_OF_TOKENS = re.compile(rb"\s*\[\s*\[")
_STRINGS = re.compile(rb"\s*\[\s*\"")

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])
_TEXTS = msgspec.json.Decoder(str | list[str])


def read_prompts(json: bytes | None, most: int | None) -> tuple[Prompt, ...]:
    """One prompt or several: text, token ids, or a list of either.

    Args:
        json: As they stand in the body; None: they do not.
        most: Tokens that a prompt may have; None: not known.

    Raises:
        ApiError: 400, they are nothing of the kind, or have too many tokens.
    """
    json = json or b"null"
    if len(json) <= _AT_ONCE:
        return _prompts(decode_body(_ANY, json))
    most = MOST_TOKENS if most is None else most
    if _TOKENS.match(json):
        _check(json, most)
        return _prompts(decode_body(_ANY, json))
    if _ROWS_OF_TOKENS.match(json):
        _refuse_many(json.count(b"[") - 1)
        return _prompts([_row(row, most) for row in decode_body(_ROWS, json)])
    if _STRINGS.match(json):
        # Two quotes a string, or one if a backslash ends it: no more are told than there are.
        _refuse_many((json.count(b'"') - json.count(b'\\"')) // 2)
    return _prompts(decode_body(_TEXTS, json, "prompt"))


def _refuse_many(count: int) -> None:
    if count > MOST_ANSWERS:
        raise bad_request(f"{count} prompts are more than {MOST_ANSWERS} answers", "prompt")


def _row(told: msgspec.Raw, most: int) -> Any:
    """Others have a turn after each."""
    json = bytes(told)
    _check(json, most)
    return decode_body(_ANY, json)


def _check(tokens: bytes, most: int) -> None:
    if (count := tokens.count(b",") + 1) > most:
        raise bad_request(too_many(count, most), "prompt", code="request_rejected")


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt is None:
        raise bad_request("prompt is missing; give text or token ids", "prompt")
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"prompt must be text or token ids, not {shown(prompt)}", "prompt")
    if all(type(item) is int for item in prompt):
        return (prompt,)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    for item in prompt:
        if not (isinstance(item, list) and all(type(each) is int for each in item)):
            raise bad_request(
                f"prompt must be text, token ids, or a list of one of them; it has {shown(item)}",
                "prompt",
            )
    return tuple(prompt)
