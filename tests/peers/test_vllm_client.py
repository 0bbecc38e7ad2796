"""vLLM's own balancing client, `DPLBAsyncMPClient`, over dpkit's engines and coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from tests.peers import vllm_python
from tests.peers.coordinator import init_of, open_command
from tests.peers.harness import _process, _shake_hands

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(300), vllm_python.NEEDED]

ENGINES = 2
REQUESTS = 200
# Steps that take their time, so that aborts find something to abort.
CONFIG = f'[[engines]]\nmodel = "tests.processes.models:Paced"\ncount = {ENGINES}\n'


def drive(folder: Path, environment: dict[str, str]) -> Any:
    """Have vLLM's client drive dpkit's engines, which hear of both from here; what it tells."""
    config = folder / "dpkit.toml"
    config.write_text(CONFIG)
    inputs, outputs = f"ipc://{folder}/in", f"ipc://{folder}/out"
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        handshake = stack.enter_context(context.socket(zmq.ROUTER))
        handshake.linger = 0
        handshake.bind(f"ipc://{folder}/hello")
        coordinator = stack.enter_context(open_command(ENGINES))
        for rank in range(ENGINES):
            engine = [sys.executable, "-m", "dpkit", "engine", "--config", str(config)]
            engine += ["--rank", str(rank), "--handshake", f"ipc://{folder}/hello"]
            where = folder / f"engine{rank}.log"
            stack.enter_context(_process(engine, where, environment=environment))
        log = stack.enter_context((folder / "client.log").open("wb"))
        client = subprocess.Popen(
            vllm_python.command(
                "vllm_client.py",
                *("--engines", str(ENGINES), "--requests", str(REQUESTS)),
                *("--input", inputs, "--output", outputs, "--stats", coordinator.front),
            ),
            env=vllm_python.environment(),
            stdout=subprocess.PIPE,
            stderr=log,
        )
        stack.enter_context(client)
        stack.callback(client.kill)
        addresses = {"inputs": [inputs], "outputs": [outputs]} | init_of(coordinator)
        _shake_hands(handshake, addresses, ENGINES)
        said, _ = client.communicate(timeout=240)
        assert client.returncode == 0, (folder / "client.log").read_text()[-3000:]
    return json.loads(said)


def test_every_request_is_answered_once_and_aborts_release(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    told = drive(tmp_path, environment)
    print(told)
    assert told["tasks"] == ["generate"]
    assert told["whole"] == REQUESTS
    assert told["ended_once"]
    assert sum(told["shares"].values()) == REQUESTS
    assert min(told["shares"].values()) > REQUESTS / 4, "both did their part"
    assert told["held_before_the_aborts"] == 40
    assert told["in_flight"] == 0
    assert told["inflight_by_engine"] == [0] * ENGINES
    assert told["counts_are_zero"]
