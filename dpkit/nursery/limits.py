"""A group's limits, from its config and its model's spec. Knows no task: `explain` asks it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.engine.limits import resolve_limits

if TYPE_CHECKING:
    from dpkit.config.schema import EngineGroupConfig
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import ModelSpec


def limits_of(group: EngineGroupConfig, spec: ModelSpec) -> EngineLimits:
    """What one engine of a group may hold and do at once.

    Raises:
        BadLimit: the model cannot have these; the message names the key.
    """
    return resolve_limits(
        spec,
        max_num_seqs=group.scheduler.max_num_seqs,
        max_num_batched_tokens=group.scheduler.max_num_batched_tokens,
        block_size=group.kv.block_size,
        num_blocks=group.kv.num_blocks,
        memory=group.kv.memory,
        prefix_cache=group.kv.prefix_cache,
        long_prefill_share=group.scheduler.long_prefill_share,
        within=f"engines.{group.name}",
    )
