"""The group that an engine steps together with: who is in it, and where they meet.

Read from what the owner of the handshake says in INIT, or else from how this engine was started.
How ranks vote is `dpkit.link.gloo`'s affair, which is imported only for a group of several.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from attrs import frozen

from dpkit.engine.waves import EngineWaves
from dpkit.errors import LaunchFailed, WireError
from dpkit.imports import INSTALL_TORCH
from dpkit.nursery.lockstep import Lockstep
from dpkit.wire.codec import MAX_ENGINES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from types import ModuleType

    from dpkit.engine.limits import EngineLimits
    from dpkit.engine.waves import Ballot
    from dpkit.messages import EngineId
    from dpkit.nursery.inbox import Inbox
    from dpkit.nursery.lockstep import Ballots
    from dpkit.wire.structs import Init

RANKS = "dpkit_ranks"
"""dpkit's own key of `parallel_config`: the ranks of the group, in their order, when they are not
all that there are: those that are left when others have been given up."""

LOST_WITH_ITS_GROUP = 75
"""Exit status of an engine whose vote failed: another rank is gone, or hangs."""

LIMIT_KEY = "coordinator.vote_timeout"


@frozen(kw_only=True)
class LockstepPlan:
    """How an engine that steps together with others was started."""

    sync_interval: int
    """Steps from one vote to the next."""
    vote_timeout: float
    """Seconds that a vote may take."""
    start_timeout: float
    """Seconds that ranks wait for each other at the start."""
    rendezvous: str | None = None
    """``HOST:PORT`` where they meet, if the owner of the handshake does not say: vLLM's Rust
    frontend never does. An address of the first rank's host."""


@frozen(kw_only=True)
class Group:
    """A group that has met: one rank's part in it."""

    waves: EngineWaves
    ballots: Ballots

    def lockstep(self, engine: EngineId, inbox: Inbox) -> Lockstep:
        """What a busy loop needs of it; for one loop only."""
        return Lockstep(engine=engine, waves=self.waves, ballots=self.ballots, inbox=inbox)


class LoneBallots:
    """Votes of a group of one, such as is left when all others have been given up."""

    async def vote(self, ballot: Ballot) -> Ballot:
        """What was put in comes out."""
        await trio.lowlevel.checkpoint()
        return ballot


@asynccontextmanager
async def open_group(
    plan: LockstepPlan | None, *, rank: int, count: int, init: Init, limits: EngineLimits
) -> AsyncGenerator[Group | None]:
    """Meet the other ranks; None if this engine steps alone.

    Args:
        plan: How it was started; None: to step alone, whatever INIT says.
        rank: The engine's.
        count: Engines that were started together; what INIT says counts more.
        init: What the owner of the handshake has said.
        limits: The engine's: those of all ranks must be equal.

    Resource handling:
        Leaving the block leaves the group, for which this rank is gone then.

    Error handling:
        WireError: INIT contradicts itself. LaunchFailed: nobody says where to meet, or there is no
        coordinator; some rank did not come; ranks are not alike.
    """
    if plan is None:
        yield None
        return
    ranks = _ranks(init.parallel_config, rank, count)
    waves = EngineWaves(rank, speaks=rank == ranks[0], sync_interval=plan.sync_interval)
    if len(ranks) == 1:
        yield Group(waves=waves, ballots=LoneBallots())
        return
    if None in {init.addresses.coordinator_input, init.addresses.coordinator_output}:
        raise LaunchFailed(
            f"rank {rank} is to step together with others, and INIT names no coordinator, without "
            "which none of them is woken; or leave out coordinator.wave_coordination"
        )
    host, port = _where(init.parallel_config, plan.rendezvous, rank)
    gloo = import_ballots()
    meeting = gloo.Meeting(
        host=host,
        port=port,
        place=ranks.index(rank),
        ranks=ranks,
        patience=plan.start_timeout,
        time_limit=plan.vote_timeout,
        limit_key=LIMIT_KEY,
    )
    facts = {
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "sync_interval": plan.sync_interval,
    }
    async with gloo.open_gloo(meeting, facts) as ballots:
        yield Group(waves=waves, ballots=ballots)


def import_ballots() -> ModuleType:
    """Import what ranks vote by, which costs torch.

    Raises:
        LaunchFailed: torch is missing.
    """
    try:
        from dpkit.link import gloo  # noqa: PLC0415 - as said
    except ImportError as error:
        raise LaunchFailed(
            f"engines that step together vote by torch, and {error.name} is missing; "
            f"{INSTALL_TORCH}"
        ) from error
    return gloo


def _ranks(told: Mapping[str, Any], rank: int, count: int) -> tuple[int, ...]:
    ranks, size = told.get(RANKS), told.get("data_parallel_size", count)
    if ranks is None and isinstance(size, int) and size <= MAX_ENGINES:
        ranks = list(range(size))
    if not isinstance(ranks, list) or ranks.count(rank) != 1 or {*map(type, ranks)} != {int}:
        raise WireError(
            f"INIT gives rank {rank} a group without itself: {RANKS} {told.get(RANKS)!r:.80}, "
            f"data_parallel_size {told.get('data_parallel_size')!r:.80}"
        )
    return tuple(ranks)


def _where(told: Mapping[str, Any], rendezvous: str | None, rank: int) -> tuple[str, int]:
    host, port = told.get("data_parallel_master_ip"), told.get("data_parallel_master_port")
    if host is None and port is None:
        if rendezvous is None:
            raise LaunchFailed(
                f"rank {rank} is to step together with others, and neither INIT says where they "
                "meet, nor --rendezvous"
            )
        host, _, text = rendezvous.rpartition(":")
        host, port = host.strip("[]"), int(text) if text.isdecimal() else None
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65_536:
        raise WireError(f"ranks cannot meet at {host!r:.80}, port {port!r:.80}")
    return host, port
