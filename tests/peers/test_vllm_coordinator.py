"""vLLM's own coordinator, `DPCoordinatorProc`, between dpkit's client and engines on its wire."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, GenerateRequest, SamplingParams, Snapshot
from dpkit.wire.codec import CoordinatorReady
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.structs import StartWave
from dpkit.wire.zsocket import open_context
from tests.link.coordination import open_client, open_engine
from tests.peers import vllm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(300), vllm_python.NEEDED]


@contextmanager
def open_vllms_coordinator(engines: int) -> Iterator[CoordinatorAddresses]:
    process = subprocess.Popen(
        vllm_python.command("vllm_coordinator.py", str(engines)),
        env=os.environ | vllm_python.environment(),
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            told = next(line for line in process.stdout if line.startswith(b'["tcp://'))
            front, back_output, back_publish = json.loads(told)
            yield CoordinatorAddresses(
                front=front, back_output=back_output, back_publish=back_publish
            )
        finally:
            process.kill()


async def test_it_serves_a_client_and_engines_of_dpkit_with_counts_and_waves() -> None:
    with open_vllms_coordinator(2) as addresses:
        async with (
            open_context() as context,
            open_engine(context, addresses, 0) as zero,
            open_engine(context, addresses, 1) as one,
            open_client(context, addresses.front) as client,
        ):
            for engine in (zero, one):
                assert isinstance(await engine.hear(), CoordinatorReady)
            zero.tell(2, 1, 0.5, step_counter=1)
            await client.wait_loads((2, 1, 0.5), (0, 0, 0.0))
            assert picks(client.heard[-1]) == 1
            one.tell(5, 5, 0.9, step_counter=1)
            await client.wait_loads((2, 1, 0.5), (5, 5, 0.9))
            assert picks(client.heard[-1]) == 0
            for wave in range(3):
                one.start_wave(wave)
                for engine in (zero, one):
                    assert await engine.hear() == StartWave(wave, 1)
                zero.complete_wave(wave)
                await client.wait(lambda wave=wave: is_over(client.heard[-1], wave))  # type: ignore[misc]
            one.start_wave(0)  # stale: nobody hears of it
            one.start_wave(3)
            assert await zero.hear() == StartWave(3, 1)
        assert client.subscription.statistics().ignored == 0


def is_over(snapshot: Snapshot, wave: int) -> bool:
    return (snapshot.current_wave, snapshot.engines_running) == (wave + 1, False)


def picks(snapshot: Snapshot) -> int:
    """Which of two engines dpkit's policy, which is vLLM's, picks by it."""
    engines = (EngineId("e-0"), EngineId("e-1"))
    view = LoadView(engines, Ledger())
    view.apply(snapshot)
    request = GenerateRequest(request_id="?", prompt_token_ids=(1,), sampling=SamplingParams())
    return load_policy("kv_pressure").pick(request, view)
