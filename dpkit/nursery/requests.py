"""From a prompt and keywords to requests: encoding, defaults, seeds, one request for each choice.

Owns the tokenizer and the client's random numbers. Knows nothing of engines or of what runs.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any, TypedDict

import trio
from attrs import evolve, frozen

from dpkit.errors import RequestRejected
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.text.transcript import Transcript

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    from dpkit.abc import Tokenizer

    Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


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
    """

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, prefix: str) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._ids = (f"{prefix}-{n}" for n in itertools.count(1))

    def make(
        self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions
    ) -> tuple[Asked, ...]:
        """Make a request for each of the `n` choices.

        Raises:
            RequestRejected: a field is out of range, or the prompt cannot be encoded.
        """
        fields: dict[str, Any] = dict(options)
        request_id = fields.pop("request_id", None) or next(self._ids)
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=self._encode(prompt),
            engine=fields.pop("engine", None),
            cache_salt=fields.pop("cache_salt", ""),
            deadline=_deadline(fields.pop("timeout", None), request_id),
            priority=fields.pop("priority", 0),
            tenant=fields.pop("tenant", None),
            resume=fields.pop("resume", False),
            sampling=self._sampling(sampling or SamplingParams(), fields, request_id),
        )
        choices = [choice_of(request, index) for index in range(request.sampling.n)]
        return tuple(Asked(choice, self._transcript(prompt, choice)) for choice in choices)

    def _sampling(
        self, sampling: SamplingParams, fields: dict[str, Any], request_id: str
    ) -> SamplingParams:
        try:
            sampling = evolve(sampling, **fields)
        except ValueError as error:
            raise RequestRejected(
                f"request {request_id}: bad sampling option: {error}", request_id=request_id
            ) from error
        if sampling.seed is None:
            # Drawn here rather than in the engine: a retry elsewhere repeats the same text.
            sampling = evolve(sampling, seed=self._rng.getrandbits(63))
        if sampling.echo and sampling.prompt_logprobs is None:
            sampling = evolve(sampling, prompt_logprobs=sampling.logprobs)
        return sampling

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt))
        token_ids = tuple(item for item in prompt if isinstance(item, int))
        if len(token_ids) == len(prompt):
            return token_ids
        return tuple(
            self._tokenizer.encode_chat([dict(m) for m in prompt if not isinstance(m, int)])
        )

    def _transcript(self, prompt: Prompt, request: GenerateRequest) -> Transcript:
        sampling = request.sampling
        return Transcript(
            self._tokenizer.decoder(request.prompt_token_ids),
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            prefix=self._text(prompt, request) if sampling.echo else "",
        )

    def _text(self, prompt: Prompt, request: GenerateRequest) -> str:
        """The prompt as it was given, or what its tokens say."""
        if isinstance(prompt, str):
            return prompt
        return Transcript(self._tokenizer.decoder()).feed(request.prompt_token_ids, last=True)


def _deadline(timeout: float | None, request_id: str) -> float | None:
    if timeout is None:
        return None
    if not timeout > 0:
        raise RequestRejected(
            f"request {request_id}: timeout must be more than 0 seconds, not {timeout!r}",
            request_id=request_id,
        )
    return trio.current_time() + timeout


def choice_of(request: GenerateRequest, index: int) -> GenerateRequest:
    """Make a request for one of the `n` completions; the first is the plain request.

    The others have seeds that follow from the request's own, the same in every process.
    """
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
