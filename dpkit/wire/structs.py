"""The structs of vLLM's engine-core wire, field by field: data only, in the order of the bytes.

Array structs are positional: their order is the contract, all fields are written, and a message
that stops early is read with defaults. Map structs are keyed by name. What a text engine has no
use for stays opaque (`Any`). Knows nothing of frames (`codec`) and of dpkit's own messages
(`convert`). Mutable, because freezing costs half of what decoding does; nobody changes one.
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from dpkit.names import VLLM_VERSION as VLLM_VERSION  # noqa: PLC0414 - whose layout this is
from dpkit.wire.tensors import Tensor  # noqa: TC001 - decoders read the annotations

# What an engine makes is checked on reading. What a user says is not, but by the engine: a value
# out of range refuses the request, and must not end the connection of a frontend with many users.
TokenIds = tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # neither NaN nor infinity
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, le=1)]


def share_of(told: float) -> float:
    """A share as it may be, of one that was told; what is no number is 0."""
    return min(1.0, max(0.0, told))


class FinishCode(enum.IntEnum):
    """Why a request ended; a frontend of vLLM's takes no other number."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


# -- Startup ---------------------------------------------------------------------------------------


class Hello(Struct, kw_only=True):
    """HELLO and READY: what an engine tells the owner of the handshake."""

    status: Literal["HELLO", "READY"]
    local: bool  # it was started by this owner, on this host
    headless: bool  # it was started without a frontend of its own
    parallel_config_hash: str | UnsetType | None = UNSET  # READY of a data-parallel engine only


class Addresses(Struct, kw_only=True):
    """Where an engine connects to, named from its side: `coordinator_input` is what it reads.

    `inputs` and `outputs` are parallel; a place in them is a frontend's client index.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(Struct, kw_only=True):
    """The owner's answer to HELLO. `parallel_config` is for engines with collectives."""

    addresses: Addresses
    parallel_config: dict[str, Any] = field(default_factory=dict)


class ReadyResponse(Struct, kw_only=True):
    """An engine's first message on each input socket. All keys are written.

    Those without a default are those without which vLLM's Rust frontend does not start.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None  # the frontend subscribes there
    dtype: str  # "float32", "bfloat16" or "float16"
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


# -- Requests --------------------------------------------------------------------------------------


class SamplingMap(Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters: a map in which an absent key is its default, vLLM's and not dpkit's.

    Keys that say nothing to an engine (text, streaming) are left out here and skipped on reading.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | UnsetType = UNSET  # unset is not false: see `convert`
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # -1: all
    prompt_logprobs: int | None = None
    eos_token_id: int | None = field(default=None, name="_eos_token_id")
    all_stop_token_ids: Any = field(default=(), name="_all_stop_token_ids")  # written only
    logit_bias: dict[int, float] | None = None
    extra_args: dict[str, Any] | None = None

    # What a dpkit engine does not do: read only in order to refuse it.
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    logprob_token_ids: Any = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    bad_words_token_ids: Any = field(default=None, name="_bad_words_token_ids")
    thinking_token_budget: Any = None
    repetition_detection: Any = None


class WireRequest(Struct, array_like=True, gc=False):
    """One request, frontend to engine: 22 fields."""

    request_id: str  # unique for the life of the engine
    prompt_token_ids: tuple[int, ...] | None
    mm_features: Any
    sampling_params: SamplingMap | None  # nil for pooling
    pooling_params: Any
    arrival_time: float  # Unix seconds
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None  # the rank that the caller pinned
    prompt_embeds: Tensor | None = None
    prompt_is_token_ids: Any = None
    client_index: int = 0  # which output socket the answers go to
    current_wave: int = 0
    priority: int = 0  # lower runs earlier
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None  # the id that the user sees
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False  # add it, then finish it at once as aborted
    session_id: str | None = None
    kv_hints: Any = None


class UtilityCall(Struct, array_like=True):
    """A call of one of the engine's methods."""

    client_index: int
    call_id: int  # unsigned, 64 bits
    method: str
    args: tuple[Any, ...] = ()


# -- Outputs ---------------------------------------------------------------------------------------


class LogprobArrays(Struct, array_like=True):
    """Logprobs of k tokens; column 0 of the first two, which have k rows, is the token itself."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    cumulative: Any = None


class PromptLogprobArrays(Struct, array_like=True):
    """The same of the prompt's tokens, all but the first."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    cumulative: Any = None
    reserved: Any = None


class RequestError(Struct, kw_only=True):
    """Why a request ended with an error."""

    code: str
    message: str
    retryable: bool = False


class PrefillStats(Struct, kw_only=True):
    """Where the KV of a prompt came from, in tokens; with a request's first token."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: Count = 0
    num_local_cached_tokens: int = 0  # in this engine, and not in a store of several
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class WireOutput(Struct, array_like=True, gc=False):
    """What one step of an engine adds to one request: 19 fields."""

    request_id: str
    new_token_ids: TokenIds
    new_logprobs: LogprobArrays | None = None
    new_prompt_logprobs_tensors: PromptLogprobArrays | None = None
    pooling_output: Any = None
    finish_reason: FinishCode | None = None
    stop_reason: int | str | None = None  # the token or the string that ended it
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None
    error: RequestError | None = None


class PrefixCacheStats(Struct, kw_only=True):
    """What the prefix cache did since the last message."""

    reset: bool = False
    requests: int = 0
    queries: Count = 0
    hits: Count = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, Any] = field(default_factory=dict)


class EngineReport(Struct, array_like=True):
    """What a dpkit engine says beside vLLM's numbers: the load in tokens, and counts since birth.

    Under a key of its own in the map, which other readers skip.
    """

    step_time_s: Seconds = 0.0
    unprefilled_tokens: Count = 0
    context_tokens: Count = 0
    free_blocks: Count = 0
    num_blocks: Count = 0
    peak_kv_usage: Share = 0.0
    steps: Count = 0
    requests_finished: Count = 0
    requests_aborted: Count = 0
    requests_refused: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    preemptions: Count = 0
    prefix_hit_tokens: Count = 0
    steps_halved: Count = 0
    prefix_query_tokens: Count = 0
    scheduled_tokens: Count = 0  # the load again, since what is added stands behind all else
    generated_tokens: Count = 0
    kv_tokens_used: Count = 0
    kv_tokens: Count = 0
    decodes: Count = 0  # from here: what the last step computed
    prefill_tokens: Count = 0
    decode_context: Count = 0
    prefill_context: Amount = 0.0
    sent: Count = 0  # requests of this frontend that have come
    acknowledged: Count = 0  # those of them that the numbers reckon with
    requests_taken_back: Count = 0


class SchedulerStats(Struct, kw_only=True):
    """An engine's load. Written whole, since strict readers refuse a map with a key missing."""

    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    num_skipped_waiting_reqs: Count = 0
    num_kv_fetch_reqs_by_stage: dict[str, Any] = field(default_factory=dict)
    step_counter: Count = 0
    current_wave: Count = 0
    kv_cache_usage: float = 0.0
    iteration_details: Any = None
    prefix_cache_stats: PrefixCacheStats | None = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: Any = None
    kv_cache_eviction_events: list[Any] = field(default_factory=list)
    spec_decoding_stats: Any = None
    kv_connector_stats: Any = None
    ec_connector_stats: Any = None
    waiting_lora_adapters: dict[str, Any] = field(default_factory=dict)
    running_lora_adapters: dict[str, Any] = field(default_factory=dict)
    cudagraph_stats: Any = None
    perf_stats: Any = None
    dpkit: EngineReport | UnsetType = UNSET

    def __post_init__(self) -> None:
        # Policies compute with it. Whoever rounds badly shall not lose the connection for it.
        self.kv_cache_usage = share_of(self.kv_cache_usage)


class UtilityAnswer(Struct, array_like=True):
    """The answer to a call. `result` is (type info, value); no value is (None, None), not None."""

    call_id: int
    failure_message: str | None = None
    result: tuple[Any, Any] | None = None


class Envelope(Struct, array_like=True, gc=False):
    """All that an engine has to say to one frontend at one moment: 9 fields, one kind.

    Either a batch (`outputs`, `scheduler_stats`, `finished_requests`), or a utility answer, or,
    to the coordinator only, a wave that is complete or begun.
    """

    engine_index: int = 0  # the engine's rank
    outputs: list[WireOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  # the engine's monotonic clock
    utility_output: UtilityAnswer | None = None
    finished_requests: list[str] | None = None  # vLLM's client releases by these alone
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


# -- Coordinator -----------------------------------------------------------------------------------


class CoordinatorPublish(Struct, array_like=True):
    """Coordinator to frontends: of each rank (waiting, running, kv_cache_usage); None: no news."""

    loads: tuple[tuple[Count, Count, float], ...] | None
    current_wave: int
    engines_running: bool


class StartWave(Struct, array_like=True):
    """Coordinator to engines: begin `wave`, all but the one that began it."""

    wave: int
    excluded: int | None = None
