"""The data that crosses a task, a thread or a process: frozen, keyword-only, no behaviour.

Knows nothing of Trio, sockets or models. Token ids are plain ints; text exists only at the client
(`dpkit.text`), so that an engine process needs no tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

from dpkit.names import FinishReason as FinishReason  # noqa: PLC0414, TC001 - to be had from here
from dpkit.sampling import SamplingParams as SamplingParams  # noqa: PLC0414 - likewise

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class EngineId(NamedTuple):
    """One life of one engine: a name may come back, an incarnation never does.

    A tuple, as it is hashed at every pick and compared at every output.
    """

    name: str
    epoch: int = 0

    def __str__(self) -> str:
        return self.name if self.epoch == 0 else f"{self.name}#{self.epoch}"


@frozen(kw_only=True)
class TokenLogprob:
    """How likely the model itself found one token at its place.

    Natural logarithms of the model's own distribution: before temperature, penalties, bias and
    filters.
    """

    token_id: int
    logprob: float
    rank: int  # 1: no other token was likelier
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, best first


@frozen(kw_only=True)
class GenerateRequest:
    """One request as an engine sees it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(factory=SamplingParams)
    engine: str | None = None  # pinned to the engine of this name
    cache_salt: str = ""  # requests with different salts never share cached blocks


@frozen(kw_only=True)
class EngineOutput:
    """What one step of an engine adds to one request; the last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where they were asked for, else none
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all at once, with the first token
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # with FinishReason.ERROR: what the client raises


@frozen(kw_only=True)
class Output:
    """Everything that became ready since the client last looked.

    A token's text may come later than the token: half a character, or what may turn out to be a
    stop string, is held back.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where they were asked for, else none
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all at once, with the first token
    finish_reason: FinishReason | None = None


@frozen(kw_only=True)
class Completion:
    """A finished request. Times are seconds from `generate` being entered."""

    request_id: str
    text: str  # after the prompt's, if the request has `echo`; without a stop string
    token_ids: tuple[int, ...]  # of the output; those that made up a stop string are among them
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where they were asked for, else none
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of each prompt token but the first
    finish_reason: FinishReason
    engine: EngineId
    ttft_s: float
    latency_s: float


@frozen(kw_only=True)
class EngineStats:
    """What an engine publishes: its queue counts and KV usage at one moment of one life.

    `seq` rises by one per message of that life; the newest (epoch, seq) wins. `step_counter` and
    `current_wave` mean something for lockstep engines only.
    """

    engine: EngineId
    index: int  # rank of the engine in the cluster
    seq: int
    waiting: int
    running: int
    kv_cache_usage: float  # share of KV blocks in use, 0.0 to 1.0
    current_wave: int = 0
    step_counter: int = 0


@frozen(kw_only=True)
class Snapshot:
    """The coordinator's word to every client: one (waiting, running, kv_cache_usage) an engine.

    `loads` is None when only the wave state changed (lockstep engines).
    """

    loads: tuple[tuple[int, int, float], ...] | None
    current_wave: int = 0
    engines_running: bool = False


@frozen(kw_only=True)
class StartWave:
    """The coordinator's word to every lockstep engine: begin `wave`, which `engine_index` began."""

    wave: int
    engine_index: int


@frozen(kw_only=True)
class BatchRow:
    """One request's share of one step. Its sequences are to be read, and only while that runs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    token_ids: Sequence[int]  # the tokens to compute in this step
    start: int  # position of the first of them: tokens whose KV is already cached
    block_ids: Sequence[int]  # block table; covers start + len(token_ids) positions
    output_index: int | None  # which output token this row samples; None inside a prompt
    output_token_ids: Sequence[int] = ()  # all before it
    banned_token_ids: Collection[int] = ()  # not to be sampled now: they would end the text
    scored: range = range(0)  # places of the prompt tokens whose logprobs this row must tell

    @property
    def is_decode(self) -> bool:
        """One token after the prompt: the common case."""
        return len(self.token_ids) == 1 and self.output_index is not None and self.output_index > 0


@frozen(kw_only=True)
class Batch:
    """One step's work: decodes first, then prefill chunks. Never empty."""

    rows: tuple[BatchRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, prompt and decode alike."""
        return sum(len(row.token_ids) for row in self.rows)


@frozen(kw_only=True)
class StepResult:
    """What a model made of a batch.

    `sampled[i]` is the token for `batch.rows[i]`, and None exactly where `output_index` is None.
    `logprobs[i]` is there for each row that samples and has `sampling.logprobs`, and
    `prompt_logprobs[i]`, one for each place, for each row with something `scored`.
    `duration_s` is virtual time the busy loop sleeps before it delivers (cost models only).
    """

    sampled: Sequence[int | None]
    logprobs: Mapping[int, TokenLogprob] = field(factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = field(factory=dict)
    duration_s: float = 0.0


@frozen(kw_only=True)
class ModelSpec:
    """What the scheduler and the client must know about a model.

    The last three are the model's own defaults for config keys that the file leaves out.
    """

    max_model_len: int | None = None  # positions; None: bounded by the KV pool only
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 2**31  # token ids are below this; an engine refuses prompts with others
    tells_logprobs: bool = False  # if not, an engine refuses requests that ask for them
    kv_bytes_per_token: int = 0  # 0: the KV cache is only counted, not held
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int | None = None  # pool size when neither num_blocks nor memory is given
