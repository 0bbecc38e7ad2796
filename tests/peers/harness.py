"""The real frontend of vLLM over engines that a command starts: we are their supervisor.

`open_frontend` binds the frontend's listeners, owns the handshake and starts all processes;
`open_server` lets the frontend do that by itself. Everything stays on 127.0.0.1 and is gone when
the block is left.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from attrs import field, frozen

from tests.peers.coordinator import Coordinator, init_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dpkit.wire.coordinator import CoordinatorAddresses

    EngineCommand = Callable[[int, str], Sequence[str]]  # of a rank and a handshake address

PATIENCE_S = 60.0
MODEL = "served"


@frozen(kw_only=True)
class Served:
    """A frontend that answers, and what it stands on."""

    port: int
    frontend: subprocess.Popen[bytes]
    log: Path
    engines: Sequence[subprocess.Popen[bytes]] = ()
    coordinator: Coordinator | None = None
    ready: Sequence[dict[str, Any]] = field(default=(), repr=False)
    """What each engine said in the handshake, last message only, by rank."""

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of one GET."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and decoded body of one POST."""
        status, text = self._ask("POST", path, body)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def complete(self, prompt: str | list[int], **options: Any) -> Any:
        """The body of a completion that must succeed."""
        body = {"model": MODEL, "prompt": prompt} | options
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a streamed answer; to leave the block early is to hang up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, *_json({"model": MODEL, "stream": True} | body))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield _events(response)
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, *_json(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _json(body: dict[str, Any] | None) -> tuple[str | None, dict[str, str]]:
    if body is None:
        return None, {}
    return json.dumps(body), {"Content-Type": "application/json"}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def open_frontend(
    vllm_rs: Path,
    model: Path,
    engine: EngineCommand,
    folder: Path,
    *,
    count: int = 2,
    environment: dict[str, str] | None = None,
    coordinator_at: CoordinatorAddresses | None = None,
) -> Iterator[Served]:
    """Have `count` engines, a coordinator and `vllm-rs frontend` up, with us as the supervisor.

    `coordinator_at`: one that is there already; else a thread of ours is one, and remembers.
    """
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        handshake = stack.enter_context(context.socket(zmq.ROUTER))
        handshake.linger = 0
        handshake.bind("tcp://127.0.0.1:*")
        coordinator = None
        if coordinator_at is None:
            coordinator = stack.enter_context(Coordinator(count))
            coordinator_at = coordinator.addresses
        web, inputs, outputs = (stack.enter_context(_listener()) for _ in range(3))
        address = handshake.get_string(zmq.LAST_ENDPOINT)
        engines = [
            stack.enter_context(_process(engine(rank, address), folder / f"engine{rank}.log"))
            for rank in range(count)
        ]
        frontend = stack.enter_context(
            _process(
                [
                    *(str(vllm_rs), "frontend", "--listen-fd", str(web.fileno())),
                    *("--input-listener-fd", str(inputs.fileno())),
                    *("--output-listener-fd", str(outputs.fileno())),
                    *("--engine-count", str(count), "--data-parallel-size", str(count)),
                    *("--coordinator-address", coordinator_at.front),
                    *("--args-json", _arguments(model)),
                ],
                folder / "frontend.log",
                pass_fds=(web.fileno(), inputs.fileno(), outputs.fileno()),
                environment=environment,
            )
        )
        port = web.getsockname()[1]
        addresses = {"inputs": [_address(inputs)], "outputs": [_address(outputs)]}
        for listener in (inputs, outputs):
            listener.close()
        ready = _shake_hands(handshake, addresses | init_of(coordinator_at), count)
        served = Served(
            port=port,
            frontend=frontend,
            log=folder / "frontend.log",
            engines=engines,
            coordinator=coordinator,
            ready=ready,
        )
        _wait_healthy(served)
        try:
            yield served
        finally:
            for process in (frontend, *engines):  # all at once: each takes its time
                process.terminate()


@contextmanager
def open_server(
    vllm_rs: Path,
    model: Path,
    executable: Path,
    folder: Path,
    *,
    count: int = 2,
    environment: dict[str, str] | None = None,
) -> Iterator[Served]:
    """Have `vllm-rs serve` up, which owns the handshake and starts `executable` for its engines."""
    with _listener() as probe:
        port = probe.getsockname()[1]
    command = [
        *(str(vllm_rs), "serve", str(model), "--served-model-name", MODEL, "--port", str(port)),
        *("--data-parallel-size", str(count), "--data-parallel-size-local", str(count)),
        *("--python", str(executable)),
    ]
    log = folder / "server.log"
    with _process(command, log, environment=environment) as frontend:
        served = Served(port=port, frontend=frontend, log=log)
        _wait_healthy(served)
        yield served


def _arguments(model: Path) -> str:
    options = {"engine_ready_timeout_secs": int(PATIENCE_S), "max_logprobs": 20}
    return json.dumps({"model_tag": str(model), "served_model_name": [MODEL], **options})


def _listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.set_inheritable(True)
    return listener


def _address(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _process(
    command: Sequence[str],
    log: Path,
    *,
    pass_fds: Sequence[int] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            env=os.environ | quiet | (environment or {}),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _shake_hands(
    handshake: zmq.Socket[bytes], addresses: dict[str, Any], count: int
) -> list[dict[str, Any]]:
    ready: dict[int, dict[str, Any]] = {}
    while len(ready) < count:
        assert handshake.poll(int(PATIENCE_S * 1000)), f"only {sorted(ready)} of {count} are ready"
        identity, payload = handshake.recv_multipart()
        message = msgspec.msgpack.decode(payload)
        if message["status"] == "READY":
            ready[int.from_bytes(identity, "little")] = message
            continue
        init = {"addresses": addresses, "parallel_config": {}}
        handshake.send_multipart([identity, msgspec.msgpack.encode(init)])
    return [ready[rank] for rank in range(count)]


def _wait_healthy(served: Served) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if served.get("/health")[0] == 200:
                return
        except OSError:
            pass
        ended = served.frontend.poll()
        assert ended is None, f"it exited with {ended}: {served.log.read_text()}"
        assert time.monotonic() < deadline, f"it is not healthy: {served.log.read_text()}"
        time.sleep(0.02)
