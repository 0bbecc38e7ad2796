"""What a config comes to for each group of engines, as far as it can be known without a start.

Reads the config.json of a model that is here; loads no weights, no torch and none of your classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.cli.joining import commands
from dpkit.config.rules import has_weights
from dpkit.engine.limits import BadLimit
from dpkit.engine.models import load_model
from dpkit.errors import ConfigError, DpkitError, ModelNotFound
from dpkit.imports import INSTALL_TORCH
from dpkit.names import EngineKind
from dpkit.nursery.limits import limits_of

if TYPE_CHECKING:
    from dpkit.config.schema import EngineGroupConfig, ProcessConfig, VllmConfig
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import ModelSpec

# Prompt and answer together: a chat of a few turns, and a round number to reckon with.
TYPICAL_TOKENS = 1024


@frozen(kw_only=True)
class KvFacts:
    """The KV cache of one engine."""

    tokens: int
    blocks: int
    block_size: int
    bytes: int | None  # None: only counted, not held, or not known
    typical_tokens: int  # of the request by which `typical_requests` counts
    typical_requests: int  # that fit at once


@frozen(kw_only=True)
class GroupFacts:
    """One group of engines. What is None is known when the model is loaded."""

    name: str
    count: int
    model: str
    kind: str
    process: ProcessConfig | None  # of kind "process"
    vllm: VllmConfig | None  # of kind "vllm", whose engines say the rest when they join
    start_with: tuple[str, ...]  # commands, of that kind; any one of them
    dtype: str
    quant: str
    device: str
    computed_in: str | None  # what `dtype` comes to on this machine, of a model with weights
    prefix_cache: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    long_prefill_share: float
    max_model_len: int | None
    kv: KvFacts | None
    note: str | None  # why something is not known, or why the group would not start

    @property
    def engines(self) -> str:
        """``smol-0``, or the first and the last."""
        first, last = f"{self.name}-0", f"{self.name}-{self.count - 1}"
        return first if self.count == 1 else f"{first} {'and' if self.count == 2 else 'to'} {last}"


def group_facts(group: EngineGroupConfig, file: str, first: int) -> GroupFacts:
    """What is known of a group; a model that is not here is no error.

    Args:
        group: Of the config.
        file: Where the config is.
        first: How many engines the groups before it have.

    Raises:
        ModelUnsupported: it is here and cannot be run.
    """
    spec, limits, note = _look_up(group)
    scheduler, joins = group.scheduler, group.kind is EngineKind.VLLM
    return GroupFacts(
        name=group.name,
        count=group.count,
        model=group.model,
        kind=group.kind.value,
        process=group.process if group.kind is EngineKind.PROCESS else None,
        vllm=group.vllm if joins else None,
        start_with=tuple(commands(file, group, first)) if joins else (),
        dtype=group.dtype.value,
        quant=group.quant.value,
        device=group.device,
        computed_in=_computed_in(group),
        prefix_cache=group.kv.prefix_cache,
        max_num_seqs=limits.max_num_seqs if limits else scheduler.max_num_seqs,
        max_num_batched_tokens=(
            limits.max_num_batched_tokens if limits else scheduler.max_num_batched_tokens
        ),
        long_prefill_share=scheduler.long_prefill_share,
        max_model_len=spec.max_model_len if spec else None,
        kv=_kv_facts(group, spec, limits),
        note=note,
    )


def bad_limit(group: EngineGroupConfig) -> BadLimit | None:
    """What of a group's limits its model cannot do, as far as that is known without a start."""
    try:
        if (spec := _spec(group)) is not None:
            limits_of(group, spec)
    except BadLimit as error:
        return error
    except (DpkitError, ModuleNotFoundError):
        pass  # what is wrong with the model is not wrong in the file
    return None


def _look_up(
    group: EngineGroupConfig,
) -> tuple[ModelSpec | None, EngineLimits | None, str | None]:
    """The model's spec and the engine's limits; where they cannot be had, why."""
    if group.kind is EngineKind.VLLM:
        return None, None, None
    spec = None
    try:
        spec = _spec(group)
        if spec is None:
            return None, None, "it is your own class, which is not loaded to explain a file"
        return spec, limits_of(group, spec), None
    except ConfigError as error:
        return spec, None, f"it would not start: {error}"
    except ModelNotFound as error:
        return None, None, str(error)
    except ModuleNotFoundError as error:
        return None, None, f"its files need {error.name}; {INSTALL_TORCH}"


def _computed_in(group: EngineGroupConfig) -> str | None:
    if group.kind is EngineKind.VLLM or not has_weights(group.model):
        return None
    from dpkit.engine.models.torch.precision import resolve_dtype  # noqa: PLC0415 - as in _spec

    return resolve_dtype(group.dtype, group.quant, group.device).value


def _spec(group: EngineGroupConfig) -> ModelSpec | None:
    model = group.model
    if model == "echo" or model.startswith("cost:"):
        return load_model(model).spec
    if not has_weights(model):
        return None
    # Not at the top: they cost an `echo` 100 ms of numpy.
    from dpkit.checkpoint import locate, read_model_config  # noqa: PLC0415
    from dpkit.engine.models.torch.architecture import read_shape  # noqa: PLC0415
    from dpkit.engine.models.torch.precision import resolve_dtype  # noqa: PLC0415
    from dpkit.engine.models.torch.spec import model_spec  # noqa: PLC0415

    path = locate(model)
    dtype = resolve_dtype(group.dtype, group.quant, group.device)
    return model_spec(read_shape(path, read_model_config(path)), dtype=dtype)


def _kv_facts(
    group: EngineGroupConfig, spec: ModelSpec | None, limits: EngineLimits | None
) -> KvFacts | None:
    blocks = limits.num_blocks if limits else group.kv.num_blocks
    if blocks is None:
        return None
    size = group.kv.block_size
    typical = min(TYPICAL_TOKENS, (spec and spec.max_model_len) or TYPICAL_TOKENS)
    per_token = spec.kv_bytes_per_token if spec else 0
    return KvFacts(
        tokens=blocks * size,
        blocks=blocks,
        block_size=size,
        bytes=blocks * size * per_token or None,
        typical_tokens=typical,
        typical_requests=blocks // -(-typical // size),
    )
