"""The bodies of OpenAI's API: JSON to an order that was checked, or a refusal in words.

Fields that nobody knows are ignored, as clients send many; fields that would change the answer and
cannot be obeyed are refused by name. Knows no model: whether a prompt fits is for others to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from attrs import evolve, fields, frozen

from dpkit.errors import plural
from dpkit.sampling import MOST_TOKENS, SamplingParams
from dpkit.serve.errors import bad_request
from dpkit.serve.messages import Message, plain_messages, read_messages
from dpkit.serve.prompts import MOST_ANSWERS, read_prompts
from dpkit.serve.unread import BodyReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dpkit.nursery.prompts import Prompt

    CheckModel: TypeAlias = Callable[[str | None], None]

_COMPLETION_TOKENS = 16  # OpenAI's default, and vLLM's

# Far beyond what clients send (OpenAI takes four strings). Each answer is searched
# for every string with each of its tokens.
_Stop: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Stops: TypeAlias = Annotated[list[_Stop], msgspec.Meta(max_length=64)]
_Ids: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=1024)]
_Biases: TypeAlias = Annotated[dict[int, float], msgspec.Meta(max_length=1024)]


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both kinds of request have. None is as good as left out, whatever the field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: _Stop | _Stops | None = None
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: _Biases | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    # What would change the answer, and cannot be had.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    _TOKENS,
    {"type": "array", "items": _TOKENS, "minItems": 1},
]


class CompletionBody(_Body, kw_only=True):
    """Of ``/v1/completions``."""

    prompt: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": _PROMPT})] = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None


class ChatBody(_Body, kw_only=True):
    """Of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    functions: Any = None
    audio: Any = None


@frozen(kw_only=True)
class Order:
    """What is to be generated, and what of it is to be told."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """But for `max_tokens`, if `max_tokens` is None here."""
    max_tokens: int | None
    """None: as many as there is room for."""
    max_tokens_field: str = "max_tokens"
    """By which it was said."""
    n: int = 1
    echo: bool = False
    without_output: bool = False
    """Only the prompt is told: `max_tokens` was 0."""
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None

    def sampling_for(self, prompt_tokens: int, longest: int) -> SamplingParams:
        """How to sample after a prompt of so many tokens, if `longest` is the most altogether."""
        if self.max_tokens is not None:
            return self.sampling
        room = max(1, longest - prompt_tokens, self.sampling.min_tokens)
        return evolve(self.sampling, max_tokens=min(room, MOST_TOKENS))


def _any_model(asked: str | None) -> None:
    """Take whatever is asked for."""


def read_completion(
    body: bytes, check_model: CheckModel = _any_model, most: int | None = None
) -> Order:
    """Read a body of ``/v1/completions``.

    Args:
        body: As it came.
        check_model: Refuses a model before anything else is looked at; None: none was named.
        most: Tokens that a prompt may have; None: not known.

    Raises:
        ApiError: 400, with the field that is wrong. What `check_model` raises.
    """
    asked = _COMPLETION.read(body)
    check_model(asked.model)
    if asked.best_of not in {None, 1} and asked.best_of != asked.n:
        raise bad_request(
            f"best_of = {asked.best_of} cannot be had: all answers are returned, none is chosen; "
            "ask for n",
            "best_of",
        )
    if asked.suffix:
        raise bad_request("suffix cannot be had: models here only write on", "suffix")
    max_tokens = _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    max_tokens = max(max_tokens, asked.min_tokens or 0) if asked.max_tokens is None else max_tokens
    only_prompt = bool(asked.echo) and max_tokens == 0
    logprobs = asked.logprobs
    return _order(
        asked,
        prompts=read_prompts(asked.prompt, most),
        max_tokens=1 if only_prompt else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if asked.echo else None,
        echo=bool(asked.echo),
        without_output=only_prompt,
    )


def read_chat(body: bytes, check_model: CheckModel = _any_model) -> Order:
    """Read a body of ``/v1/chat/completions``; as `read_completion` otherwise."""
    asked = _CHAT.read(body)
    check_model(asked.model)
    if asked.tool_choice not in (None, "none", "auto"):
        raise bad_request("no tool can be called here; leave tool_choice out", "tool_choice")
    for name in ("functions", "audio"):
        if getattr(asked, name):
            raise bad_request(f"{name} cannot be had; leave it out", name)
    if not asked.messages:
        raise bad_request("messages is empty; give one at least", "messages")
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    field = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    return _order(
        asked,
        prompts=(plain_messages(asked.messages),),
        max_tokens=getattr(asked, field),
        max_tokens_field=field,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        called={"max_tokens": field, "logprobs": "top_logprobs"},
    )


def _order(
    asked: _Body,
    *,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    called: Mapping[str, str] | None = None,
    **more: Any,
) -> Order:
    """The order, but for `called`: what this route calls those that sampling calls otherwise."""
    _refuse_grammars(asked)
    n = 1 if asked.n is None else asked.n
    if n * len(prompts) > MOST_ANSWERS:
        raise bad_request(
            f"{plural(len(prompts), 'prompt')} and n = {n} are more than {MOST_ANSWERS} answers",
            "n",
        )
    told: dict[str, int | None] = {name: more.pop(name) for name in _TOLD if name in more}
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    return Order(
        prompts=prompts,
        sampling=_sampling(asked, max_tokens, n, told, called or {}),
        max_tokens=max_tokens,
        n=n,
        stream=bool(asked.stream),
        usage=bool(options and (options.include_usage or options.continuous_usage_stats)),
        running_usage=bool(options and options.continuous_usage_stats),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
        timeout=asked.timeout,
        **more,
    )


def _refuse_grammars(asked: _Body) -> None:
    for name in _GRAMMARS:
        value = getattr(asked, name)
        if value is None or (isinstance(value, dict) and value.get("type") == "text"):
            continue
        raise bad_request(f"{name} cannot be had: no grammar bounds the answers here", name)


def _sampling(
    asked: _Body,
    max_tokens: int | None,
    n: int,
    told: Mapping[str, int | None],
    called: Mapping[str, str],
) -> SamplingParams:
    given = {name: getattr(asked, name) for name in _SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("top_k") == -1:  # vLLM's word for all
        given["top_k"] = 0
    if max_tokens is None:
        max_tokens = MOST_TOKENS
    try:
        # 1.0 is OpenAI's temperature; who embeds dpkit has greedy.
        return SamplingParams(**{"temperature": 1.0, **given, **told}, max_tokens=max_tokens, n=n)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        field = called.get(name, name)
        raise bad_request(f"{field} {problem}", field if name in _FIELDS else None) from None


_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_BOUNDED = ("stop", "stop_token_ids", "logit_bias", *_GRAMMARS)
_COMPLETION = BodyReader(CompletionBody, (*_BOUNDED, "suffix"), prompt=bytes)  # `read_prompts`
_CHAT = BodyReader(
    ChatBody, (*_BOUNDED, "tool_choice", "functions", "audio"), messages=read_messages
)
_FIELDS = {attribute.name for attribute in fields(SamplingParams)}
_TOLD = ("logprobs", "prompt_logprobs")
_OWN = {"max_tokens", "n", "echo", *_TOLD}
_SAMPLING = tuple(name for name in CompletionBody.__struct_fields__ if name in _FIELDS - _OWN)
