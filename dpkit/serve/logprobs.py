"""Log-probabilities in the two forms of OpenAI's API, of completions and of chats.

Knows tokens by their numbers; their texts come from the model's tokenizer, once each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dpkit.messages import TokenLogprob

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Spelling:
    """Texts of single tokens, remembered: at most one a token of the vocabulary.

    Args:
        spell: Says the text of a token.
    """

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Text of a token; of one that has none, its number as vLLM writes it."""
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._spell(token_id) or f"token_id:{token_id}"
        return text


def of_completion(
    spelling: Spelling,
    told: Sequence[TokenLogprob | None],
    token_ids: Iterable[int],
    offset: int,
) -> tuple[dict[str, Any], int]:
    """What completions have, and where the text goes on.

    Args:
        spelling: Of the tokens.
        told: Of each token; None of the first of a prompt, which nothing comes before.
        token_ids: The tokens.
        offset: Characters before the first.
    """
    tokens = [spelling(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    fields = {
        "tokens": tokens,
        "token_logprobs": [None if each is None else each.logprob for each in told],
        "top_logprobs": [None if each is None else _by_text(spelling, each) for each in told],
        "text_offset": offsets,
    }
    return fields, offset


def _by_text(spelling: Spelling, told: TokenLogprob) -> dict[str, float]:
    """The likeliest by their texts, and the token itself: of two with one text, the likelier."""
    by_text: dict[str, float] = {}
    for token_id, logprob in (*told.top, (told.token_id, told.logprob)):
        by_text.setdefault(spelling(token_id), logprob)
    return by_text


def of_chat(spelling: Spelling, told: Iterable[TokenLogprob]) -> dict[str, Any]:
    """What chats have."""
    return {
        "content": [
            {
                **_entry(spelling, each.token_id, each.logprob),
                "top_logprobs": [_entry(spelling, *pair) for pair in each.top],
            }
            for each in told
        ]
    }


def _entry(spelling: Spelling, token_id: int, logprob: float) -> dict[str, Any]:
    token = spelling(token_id)
    # Part of a character: its bytes are not known here.
    known = None if _UNKNOWN in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": known}
