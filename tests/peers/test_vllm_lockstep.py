"""vLLM's own ranks of a mixture of experts behind dpkit: they step together, in vLLM's waves.

Their engine core, votes and scheduler are vLLM's; only the model is ours (`vllm_echo`).
"""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import EngineLost
from dpkit.nursery.events import EventKind
from tests.clusters import is_idle, told
from tests.joined.lab import SUPERVISION, free_address, group, open_joined, serves
from tests.peers import vllm_python
from tests.peers.byte_model import write_byte_model_of_experts
from tests.peers.test_vllm_engines import (
    PATIENCE_S,
    VLLM,
    ask,
    leave_many,
    running,
    signal_engines,
    start_commands_of,
)
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.nursery.cluster import Cluster

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(600), vllm_python.NEEDED]

WAVES = "[coordinator]\nwave_coordination = true\n"


def ranks(model: Path) -> str:
    """A group of two that joins and steps together."""
    place = free_address().removeprefix("tcp://")
    return group(
        free_address(),
        count=2,
        model=str(model),
        vllm=f'rendezvous = "{place}", {VLLM}',
        supervision=f'{SUPERVISION}, strategy = "one_for_all"',
    )


async def test_I02_ranks_of_experts_go_through_waves_and_answer_200_of_200(tmp_path: Path) -> None:
    config = ranks(write_byte_model_of_experts(tmp_path / "model"))
    both, _ = start_commands_of(config, WAVES)
    async with running(both, tmp_path, 0.002), open_joined(config, settings=WAVES) as cluster:
        for wave in range(3):
            with trio.fail_after(30):  # alone, neither could come by a vote
                await ask(cluster, f"wave {wave} from there", engine=f"v-{1 - wave % 2}")
            await wait_asleep(cluster, wave + 1)
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(ask, cluster, f"{number} of two hundred")
        await leave_many(cluster)
        await until(lambda: not cluster.statistics().coordinator.engines_running)
        assert not told(cluster, EventKind.ENGINE_LOST)


async def wait_asleep(cluster: Cluster, wave: int) -> None:
    """Wait until all waves before that one have ended."""

    def is_asleep() -> bool:
        now = cluster.statistics().coordinator
        return (now.current_wave, now.engines_running) == (wave, False)

    await until(is_asleep)


async def test_E06_all_are_lost_with_one_and_serve_again_when_all_are_started_again(
    tmp_path: Path,
) -> None:
    config = ranks(write_byte_model_of_experts(tmp_path / "model"))
    _, single = start_commands_of(config, WAVES)
    first, second = ([str(rank) if word == "RANK" else word for word in single] for rank in (0, 1))
    async with (
        running(first, tmp_path, 0.02) as one,
        running(second, tmp_path, 0.02) as other,
        open_joined(config, settings=WAVES) as cluster,
    ):
        await ask(cluster, "hello", engine="v-1")
        with pytest.raises(EngineLost, match="v-0 was lost while it held request"):
            async with cluster.client.generate("goes on and on " * 9, engine="v-0") as stream:
                await stream.__anext__()
                signal_engines(other, signal.SIGKILL)
                await stream.read_all()
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 2)
        signal_engines(one, signal.SIGKILL)
        async with running(first, tmp_path, 0.002), running(second, tmp_path, 0.002):
            both_serve = lambda: all(serves(cluster, f"v-{rank}", 1) for rank in (0, 1))  # noqa: E731
            await until(both_serve, limit=PATIENCE_S)
            await ask(cluster, "again", engine="v-0")
            await ask(cluster, "and again", engine="v-1")
            await until(lambda: is_idle(cluster))
