"""Every metric that there is: name, kind, labels, and what it says.

The one list that text, documentation, dashboards and tests go by. Names and labels are those of
vLLM 0.33 where vLLM has the same; what it has not begins with ``dpkit:``.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class Kind(StrEnum):
    """What Prometheus may do with it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """Never goes down while the process lives, whatever becomes of engines."""
    HISTOGRAM = "histogram"
    """Likewise."""


@frozen
class Family:
    """Metrics of one name."""

    name: str
    """As it is scraped; of a histogram, without ``_bucket``, ``_sum`` and ``_count``."""
    kind: Kind
    labels: tuple[str, ...]
    text: str
    alias_of: str | None = None
    """The one with the same numbers: this is an older name of it."""


_CLUSTER = ("model_name",)
_ENGINE = ("model_name", "engine")


def _gauge(name: str, text: str, *more: str, of: tuple[str, ...] = _ENGINE) -> Family:
    return Family(name, Kind.GAUGE, (*of, *more), text)


def _counter(name: str, text: str, *more: str, of: tuple[str, ...] = _ENGINE) -> Family:
    return Family(name, Kind.COUNTER, (*of, *more), text)


def _histogram(name: str, text: str, *more: str, of: tuple[str, ...] = _ENGINE) -> Family:
    return Family(name, Kind.HISTOGRAM, (*of, *more), text)


def _alias(name: str, of: Family) -> Family:
    return Family(name, of.kind, of.labels, f"Older name of {of.name}.", of.name)


_KV = _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
_QUERIES = _counter(
    "vllm:prefix_cache_queries_total", "Tokens that were looked for in the prefix cache."
)
_HITS = _counter("vllm:prefix_cache_hits_total", "Tokens that were found there.")
_ITL = _histogram(
    "vllm:inter_token_latency_seconds",
    "From a token of a request to its next one, as its engine's steps arrive.",
)

VLLM = (
    _gauge("vllm:num_requests_running", "Requests in the engine's batch."),
    _gauge("vllm:num_requests_waiting", "Requests that wait in the engine."),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "The same by reason: all for want of capacity, none deferred.",
        "reason",
    ),
    _KV,
    _gauge(
        "vllm:cache_config_info",
        "1; the size of the KV pool is in the labels.",
        "block_size",
        "num_gpu_blocks",
    ),
    _QUERIES,
    _HITS,
    _counter(
        "vllm:prompt_tokens_total", "Prompt tokens of requests that were given a first token."
    ),
    _counter(
        "vllm:prompt_tokens_cached_total", "Tokens that were found there, again after a preemption."
    ),
    _counter("vllm:generation_tokens_total", "Tokens generated."),
    _counter("vllm:num_preemptions_total", "Requests that lost their blocks to older ones."),
    _counter(
        "vllm:request_success_total",
        "Requests that ended, by how: stop, length, abort or error.",
        "finished_reason",
    ),
    _histogram("vllm:time_to_first_token_seconds", "From admission to the first token."),
    _ITL,
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Of each finished request, the mean time from token to token.",
    ),
    _histogram("vllm:e2e_request_latency_seconds", "Of finished requests, from admission to end."),
    _histogram(
        "vllm:request_queue_time_seconds",
        "Of finished requests, from admission to the pick of an engine: in dpkit's queue.",
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "Of finished requests, from the pick to the first token, the engine's queue included.",
    ),
    _histogram(
        "vllm:request_decode_time_seconds", "Of finished requests, from the first token to the end."
    ),
    _histogram(
        "vllm:request_inference_time_seconds", "Of finished requests, from the pick to the end."
    ),
    _histogram("vllm:request_prompt_tokens", "Of finished requests, the prompt's tokens."),
    _histogram("vllm:request_generation_tokens", "Of finished requests, the tokens generated."),
    _histogram("vllm:request_params_max_tokens", "Of finished requests, what they asked for."),
    _histogram(
        "vllm:iteration_tokens_total",
        "Tokens of a step: generated, and the prompts of those who got their first one.",
    ),
)

ALIASES = (
    _alias("vllm:gpu_cache_usage_perc", _KV),
    _alias("vllm:gpu_prefix_cache_queries_total", _QUERIES),
    _alias("vllm:gpu_prefix_cache_hits_total", _HITS),
    _alias("vllm:time_per_output_token_seconds", _ITL),
)

HTTP = (
    _counter(
        "http_requests_total",
        "Answers but those to probes, by class of status: 2xx, 4xx, 5xx.",
        "method",
        "status",
        "handler",
        of=(),
    ),
    _histogram(
        "http_request_duration_seconds",
        "From the complete request to the end of its answer, but of probes.",
        "method",
        "handler",
        of=(),
    ),
)

DPKIT = (
    _gauge("dpkit:engine_info", "1; the names that go with a rank are in the labels.", "name"),
    _gauge("dpkit:engine_state", "1 for the state that the engine is in, else 0.", "state"),
    _gauge("dpkit:engine_state_seconds", "How long it has been in this state."),
    _counter("dpkit:engine_restarts_total", "Lives begun after an earlier one was lost."),
    _gauge("dpkit:requests_inflight", "Unfinished requests on the engine, by our own books."),
    _counter(
        "dpkit:picks_total", "Requests placed: by a policy's name, pinned, or held.", "reason"
    ),
    _counter(
        "dpkit:requests_ended_total",
        "Requests that ended, by cause; of those that never had an engine, engine is empty.",
        "cause",
    ),
    _histogram(
        "dpkit:cancel_to_freed_seconds", "From an abort to the moment when its blocks are free."
    ),
    _gauge(
        "dpkit:requests_queued", "Requests that wait for room on any engine, in dpkit.", of=_CLUSTER
    ),
    _counter("dpkit:requests_admitted_total", "Requests begun.", of=_CLUSTER),
    _counter("dpkit:requests_refused_total", "Requests that found the queue full.", of=_CLUSTER),
    _counter(
        "dpkit:requests_retried_total",
        "Placed anew after their engine was lost before their first token.",
        of=_CLUSTER,
    ),
    _counter(
        "dpkit:requests_resumed_total",
        "Continued on another engine after their tokens so far.",
        of=_CLUSTER,
    ),
    _counter(
        "dpkit:requests_taken_back_total",
        "Had back from an engine that did not run them, and placed anew; no abort of the engine's.",
        of=_CLUSTER,
    ),
    _counter(
        "dpkit:retries_refused_total", "Lost for want of admission.retry_budget.", of=_CLUSTER
    ),
    _counter(
        "dpkit:late_outputs_total", "Outputs for requests that had ended; dropped.", of=_CLUSTER
    ),
    _gauge(
        "dpkit:scheduler_imbalance",
        "Requests on the ready engine that has most, less those on the one that has least.",
        of=_CLUSTER,
    ),
    _gauge(
        "dpkit:snapshot_age_seconds",
        "Since the coordinator last told loads; at rest, up to 5 s.",
        of=_CLUSTER,
    ),
    _gauge(
        "dpkit:engines_without_load",
        "Ready engines that have served for 10 s and never told their load.",
        of=_CLUSTER,
    ),
    _gauge(
        "dpkit:engines_unreported",
        "Engines that may be picked and have told some client nothing of their work, yet or ever.",
        of=_CLUSTER,
    ),
    _gauge("dpkit:engines_ejected", "Engines that are left out for a while.", of=_CLUSTER),
    _counter("dpkit:ejections_total", "Times that an engine was left out.", of=_CLUSTER),
    _gauge("dpkit:engines_on_probation", "Engines that must serve one request first.", of=_CLUSTER),
    _counter("dpkit:coordinator_restarts_total", "Of the coordinator.", of=_CLUSTER),
    _gauge(
        "dpkit:arbiter_up",
        "1 if several clients that bind late have their arbiter, else 0; absent if they need none.",
        of=_CLUSTER,
    ),
    _gauge("dpkit:wave", "Of engines that step together, the wave.", of=_CLUSTER),
    _counter("dpkit:events_lost_total", "Events that log.events missed.", of=_CLUSTER),
    _counter("dpkit:steps_lost_total", "Steps that log.steps missed.", of=_CLUSTER),
    _gauge(
        "dpkit:server_state",
        "1 for the state that the server is in, else 0.",
        "state",
        of=(),
    ),
    _counter(
        "dpkit:http_answers_total",
        "All answers, by status (499: the client left before) and by how they ended.",
        "handler",
        "code",
        "ending",
        of=(),
    ),
    _counter(
        "dpkit:client_disconnects_total",
        "Clients that left before their answer was complete.",
        of=(),
    ),
    _gauge("dpkit:loop_lag_seconds", "One round of Trio's loop, after the last scrape.", of=()),
)

FAMILIES = (*VLLM, *ALIASES, *HTTP, *DPKIT)
"""All of them; beside them are `prometheus_client`'s own of the process: ``process_``,
``python_``."""


def samples_of(family: Family) -> tuple[str, ...]:
    """Names under which a family can be asked for."""
    if family.kind is Kind.HISTOGRAM:
        return tuple(f"{family.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
    return (family.name,)
