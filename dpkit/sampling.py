"""How a request wants its text: every knob with its range, refused in words when out of it.

Names, defaults and ranges are OpenAI's and vLLM's, so that a front end passes them through;
docs/sampling.md has the formulas. A leaf module: knows nothing of how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import field, fields, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attrs import Attribute

    Validator: TypeAlias = Callable[[Any, Any, Any], None]

_MOST_LOGPROBS = 20  # as many as OpenAI gives, and vLLM unless it is told otherwise
_MOST_COMPLETIONS = 128  # OpenAI's
_LARGEST_BIAS = 100  # OpenAI's; with it a token is as good as certain, or banned
_LARGEST_PENALTY = 2  # OpenAI's

# Far beyond use, and far within what float32 holds: beyond that a sampler meets infinities.
_HOTTEST = 100
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.01, 100

MOST_TOKENS = 2**31 - 1  # no text is as long; ids and counts fit what models compute with

_LEAST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1  # whatever 64 bits can hold, signed or not

_CHECK = "check"  # where the metadata of a field has its validator

_MOST_SHOWN = 60  # characters of a wrong value; the message is for a line in a log


def shown(value: object) -> str:
    """A wrong value as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - somebody else's class, or an int too long for a string
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _refuse_unless(accepts: Callable[[Any], bool], words: str) -> Validator:
    """A validator; `words` complete "must be"."""

    def validate(_: object, attribute: Any, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{attribute.name} must be {words}, not {shown(value)}")

    return validate


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_real(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= most  # NaN is in no range


def _whole(least: int, most: int) -> Validator:
    return _refuse_unless(
        lambda value: _is_whole(value, least, most), f"a whole number from {least} to {most}"
    )


def _whole_or_none(least: int, most: int) -> Validator:
    return _refuse_unless(
        lambda value: value is None or _is_whole(value, least, most),
        f"None or a whole number from {least} to {most}",
    )


def _real(least: float, most: float) -> Validator:
    return _refuse_unless(
        lambda value: _is_real(value, least, most), f"a number from {least:g} to {most:g}"
    )


_SHARE_ABOVE_0 = _refuse_unless(
    lambda value: _is_real(value, 0, 1) and value > 0, "a number above 0, at most 1"
)
_FLAG = _refuse_unless(lambda value: isinstance(value, bool), "True or False")
_SEED = _refuse_unless(
    lambda value: value is None or _is_whole(value, _LEAST_SEED, _LARGEST_SEED),
    "None or a whole number of at most 64 bits",
)


def _token_ids(_: object, attribute: Any, value: tuple[Any, ...]) -> None:
    for token_id in value:
        if not _is_whole(token_id, 0, MOST_TOKENS):
            raise ValueError(
                f"{attribute.name} must be token ids, from 0 on, not {shown(token_id)}"
            )


def _strings(_: object, attribute: Any, value: tuple[Any, ...]) -> None:
    for string in value:
        if not (isinstance(string, str) and string):
            raise ValueError(
                f"{attribute.name} must be strings that are not empty, not {shown(string)}"
            )


def _biases(_: object, attribute: Any, value: tuple[Any, ...]) -> None:
    for pair in value:
        match pair:
            case (token_id, bias) if _is_whole(token_id, 0, MOST_TOKENS):
                if not _is_real(bias, -_LARGEST_BIAS, _LARGEST_BIAS):
                    raise ValueError(
                        f"{attribute.name} must be from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, "
                        f"not {shown(bias)} for token {token_id}"
                    )
            case _:
                raise ValueError(
                    f"{attribute.name} must map token ids, from 0 on, to numbers, not {shown(pair)}"
                )


def _at_most_max_tokens(sampling: SamplingParams, attribute: Any, value: Any) -> None:
    if not _is_whole(value, 0, sampling.max_tokens):
        raise ValueError(
            f"{attribute.name} must be a whole number from 0 to max_tokens, which is "
            f"{sampling.max_tokens}, not {shown(value)}"
        )


def _several(value: Any) -> tuple[Any, ...]:
    """Whatever was given as a tuple, for the validators to judge."""
    if type(value) is tuple:  # most often: the default
        return value
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:  # not iterable, or it only says so
        return (value,)


def _as_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _several(value)


def _as_token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    return _several(value)


def _as_pairs(
    value: Mapping[int, float] | Iterable[tuple[int, float]] | None,
) -> tuple[tuple[int, float], ...]:
    """Pairs rather than the mapping itself, which could be changed and has no hash."""
    if type(value) is tuple:
        return value
    return _several(value.items() if isinstance(value, Mapping) else value)


def _later(_: type, attributes: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """Keep the validators for `__attrs_post_init__`."""
    return [each.evolve(validator=None, metadata={_CHECK: each.validator}) for each in attributes]


@frozen(kw_only=True, field_transformer=_later)
class SamplingParams:
    """How output tokens are chosen, when a request ends, and what is told about it.

    Greedy by default: the same prompt gives the same text, which is what a first try, a test and
    a bug report want.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    max_tokens: int = field(default=128, validator=_whole(1, MOST_TOKENS))
    min_tokens: int = field(default=0, validator=_at_most_max_tokens)
    """Nothing ends the text before it has this many tokens."""

    temperature: float = field(default=0.0, validator=_real(0, _HOTTEST))
    """0 is greedy."""
    top_k: int = field(default=0, validator=_whole(0, MOST_TOKENS))
    """Only the k best are candidates; 0: all are."""
    top_p: float = field(default=1.0, validator=_SHARE_ABOVE_0)
    """Only as few of the best as hold this share are candidates."""
    min_p: float = field(default=0.0, validator=_real(0, 1))
    """Only those are candidates whose share is at least this part of the best one's."""
    seed: int | None = field(default=None, validator=_SEED)
    """None: drawn by the client, so that a retry repeats the same draws."""

    repetition_penalty: float = field(
        default=1.0, validator=_real(_SMALLEST_FACTOR, _LARGEST_FACTOR)
    )
    """Above 1: tokens of prompt and output become less likely; below, more."""
    presence_penalty: float = field(
        default=0.0, validator=_real(-_LARGEST_PENALTY, _LARGEST_PENALTY)
    )
    """Taken once from the score of every token of the output."""
    frequency_penalty: float = field(
        default=0.0, validator=_real(-_LARGEST_PENALTY, _LARGEST_PENALTY)
    )
    """Taken from the score of a token for each time that it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = field(
        default=(), converter=_as_pairs, validator=_biases
    )
    """Added to the scores of single tokens: a mapping from token id, which is kept as pairs."""

    stop: tuple[str, ...] = field(default=(), converter=_as_strings, validator=_strings)
    """Strings before which the text ends, or one string. The client watches for them."""
    stop_token_ids: tuple[int, ...] = field(
        default=(), converter=_as_token_ids, validator=_token_ids
    )
    """Tokens that end the text, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = field(default=False, validator=_FLAG)
    """The model's own end-of-sequence tokens do not end the text."""

    logprobs: int | None = field(default=None, validator=_whole_or_none(0, _MOST_LOGPROBS))
    """Tell the log-probability of each output token, and of that many of the likeliest."""
    prompt_logprobs: int | None = field(default=None, validator=_whole_or_none(0, _MOST_LOGPROBS))
    """The same of each prompt token but the first."""
    echo: bool = field(default=False, validator=_FLAG)
    """The prompt's text comes in front; with `logprobs`, those of the prompt come too."""
    n: int = field(default=1, validator=_whole(1, _MOST_COMPLETIONS))
    """Completions of the prompt: `Client.generate_many` gives a stream of each."""

    def __attrs_post_init__(self) -> None:
        """Check what differs from its default: a request leaves most of it out."""
        for attribute, name, default, check in _CHECKS:
            if (value := getattr(self, name)) is not default:
                check(self, attribute, value)


_CHECKS = tuple(
    (each, each.name, each.default, each.metadata[_CHECK]) for each in fields(SamplingParams)
)
