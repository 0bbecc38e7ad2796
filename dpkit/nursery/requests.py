"""From a prompt and keywords to requests: checks, defaults, seeds, one request for each choice.

Whatever is wrong with a request is said here, to its caller alone; what passes is of the right
types. Owns the client's random numbers. Knows nothing of engines or of what runs.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any, TypedDict

import trio
from attrs import evolve, frozen

from dpkit.config.checks import did_you_mean
from dpkit.errors import RequestRejected
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.nursery.prompts import Encoder
from dpkit.sampling import MOST_TOKENS, shown
from dpkit.text.transcript import Transcript

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from dpkit.abc import Tokenizer
    from dpkit.nursery.prompts import Prompt


class RequestOptions(TypedDict, total=False):
    """Keywords of `Client.generate`; the last ones are fields of `SamplingParams`."""

    request_id: str | None
    """Shown in errors and statistics; made up when left out."""
    engine: str | None
    """Pins the request to the engine of this name."""
    cache_salt: str
    """Requests with different salts never share cached blocks."""
    timeout: float | None
    """Seconds from now within which the request must end, queue and retries included."""
    priority: int
    """Lower goes first when requests queue."""
    tenant: str | None
    """Whose it is: tenants that queue share fairly what there is, by tokens."""
    resume: bool
    """If the engine is lost after the first token, go on elsewhere from the tokens so far."""
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    n: int


@frozen
class Asked:
    """One request, and what turns its tokens into text."""

    request: GenerateRequest
    transcript: Transcript


class RequestMaker:
    """Makes the requests of one client.

    Args:
        tokenizer: Of the model that serves them.
        rng: Draws the seeds of requests that bring none.
        prefix: Begins the ids that are made up.
        vocab_size: As `Encoder` has it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rng: random.Random,
        prefix: str,
        vocab_size: int = MOST_TOKENS + 1,
    ) -> None:
        self.encoder = Encoder(tokenizer, vocab_size)
        self._rng = rng
        self._ids = (f"{prefix}-{n}" for n in itertools.count(1))

    def make(
        self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions
    ) -> tuple[Asked, ...]:
        """Make a request for each of the `n` choices.

        Raises:
            RequestRejected: an option is of the wrong type or out of range, or the prompt cannot
                be encoded.
            TypeError: there is no such option.
        """
        fields: dict[str, Any] = dict(options)
        request_id = self._request_id(fields.pop("request_id", None))
        try:
            request = self._request(request_id, prompt, sampling, fields)
            if request.sampling.n == 1:
                return (Asked(request, self._transcript(prompt, request)),)
            choices = [choice_of(request, index) for index in range(request.sampling.n)]
            return tuple(Asked(choice, self._transcript(prompt, choice)) for choice in choices)
        except RequestRejected as error:
            message = f"request {request_id}: {error}"
            raise RequestRejected(message, request_id=request_id) from error.__cause__

    def _request_id(self, given: Any) -> str:
        request_id = next(self._ids) if given is None or given == "" else given
        if not isinstance(request_id, str):
            raise RequestRejected(f"request_id must be None or text, not {shown(given)}")
        return request_id

    def _request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        fields: dict[str, Any],
    ) -> GenerateRequest:
        own = {name: fields.pop(name) for name in _OPTIONS if name in fields}
        for name, value in own.items():
            kind, words = _OPTIONS[name]
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise RequestRejected(f"{name} must be {words}, not {shown(value)}")
        if not isinstance(sampling, SamplingParams | None):
            raise RequestRejected(f"sampling must be SamplingParams, not {shown(sampling)}")
        deadline = _deadline(own.pop("timeout", None))
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=self.encoder.encode(prompt),
            deadline=deadline,
            sampling=self._sampling(sampling, fields),
            is_checked=True,
            **own,
        )

    def _sampling(self, given: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
        if fields.get("seed", given and given.seed) is None:
            # Drawn here rather than in the engine: a retry elsewhere repeats the same text.
            fields["seed"] = self._rng.getrandbits(63)
        try:
            sampling = SamplingParams(**fields) if given is None else evolve(given, **fields)
        except ValueError as error:
            raise RequestRejected(f"bad sampling option: {error}") from error
        except TypeError:
            _refuse_unknown(fields)
            raise
        if sampling.echo and sampling.prompt_logprobs is None:
            sampling = evolve(sampling, prompt_logprobs=sampling.logprobs)
        return sampling

    def _transcript(self, prompt: Prompt, request: GenerateRequest) -> Transcript:
        sampling, token_ids = request.sampling, request.prompt_token_ids
        return Transcript(
            self.encoder.decoder(token_ids),
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            prefix=self.encoder.text(prompt, token_ids) if sampling.echo else "",
        )


# What an option may be, and how that is said. The sampling's own fields check themselves.
_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "engine": (str | None, "None or the name of an engine"),
    "cache_salt": (str, "text"),
    "timeout": (float | int | None, "None or a number of seconds"),
    "priority": (int, "a whole number"),
    "tenant": (str | None, "None or text"),
    "resume": (bool, "True or False"),
}


def _refuse_unknown(names: Iterable[str]) -> None:
    known = RequestOptions.__annotations__
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise TypeError(f"there is no option {name!r} of a request{near}") from None


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not timeout > 0:
        raise RequestRejected(f"timeout must be more than 0 seconds, not {shown(timeout)}")
    try:
        return trio.current_time() + timeout
    except OverflowError:  # an int beyond all floats: no time at all
        return None


def choice_of(request: GenerateRequest, index: int) -> GenerateRequest:
    """Make a request for one of the `n` completions; the first is the plain request.

    The others have seeds that follow from the request's own, the same in every process.
    """
    if request.sampling.n == 1:  # most often, and not worth a copy
        return request
    sampling = evolve(request.sampling, n=1)
    if index == 0:
        return evolve(request, sampling=sampling)
    name = f"{sampling.seed}/{index}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1
    return evolve(
        request,
        request_id=f"{request.request_id}.{index}",
        sampling=evolve(sampling, seed=seed),
    )
