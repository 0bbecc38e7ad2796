#!/usr/bin/env python3
"""Have vLLM's own server stand in front of dpkit's engines.

`vllm-rs serve` starts a program that brings its engines up; this is one that brings up dpkit's:
    vllm-rs serve MODEL --data-parallel-size 2 --python examples/vllm_engines.py
MODEL is a directory in Hugging Face layout. With DPKIT_CONFIG=dpkit.toml in the environment the
engines are those of that file; without, each is of MODEL and all else is default. If the file has
`wave_coordination = true` they step together, as vllm-rs expects of a mixture-of-experts MODEL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import trio


def asked() -> argparse.Namespace:
    """What vllm-rs says, as far as it is for us: it speaks to its program as to vLLM's own."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", dest="module")  # it takes us for a Python interpreter
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--data-parallel-address", required=True)
    parser.add_argument("--data-parallel-rpc-port", required=True)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--data-parallel-size-local", type=int)  # of them, how many are ours
    return parser.parse_known_args()[0]


async def main(arguments: argparse.Namespace, config: str) -> int:
    """Start the engines, and end with the first of them, on SIGTERM, or with vllm-rs."""
    address = f"tcp://{arguments.data_parallel_address}:{arguments.data_parallel_rpc_port}"
    count = arguments.data_parallel_size_local or arguments.data_parallel_size
    with socket.create_server(("127.0.0.1", 0)) as probe:
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"  # vllm-rs tells them no place to meet
    lifeline, _ = os.pipe()  # its other end closes with this process, however that ends
    codes = []

    async def engine(rank: int) -> None:
        command = [
            *(sys.executable, "-m", "dpkit", "engine", "--lifeline", "--config", config),
            *("--rank", str(rank), "--handshake", address, "--rendezvous", rendezvous),
        ]
        ended = await trio.run_process(command, stdin=lifeline, check=False)
        codes.append(ended.returncode)
        nursery.cancel_scope.cancel()

    async def obey() -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(signals)
        nursery.cancel_scope.cancel()

    async def watch_parent() -> None:
        await trio.lowlevel.wait_readable(os.pidfd_open(os.getppid()))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(obey)
        nursery.start_soon(watch_parent)
        for rank in range(count):
            nursery.start_soon(engine, rank)
    return codes[0] if codes else 0


if __name__ == "__main__":
    arguments = asked()
    with tempfile.TemporaryDirectory() as folder:
        config = os.environ.get("DPKIT_CONFIG")
        if config is None:
            path = Path(folder, "dpkit.toml")
            count, model = arguments.data_parallel_size, json.dumps(arguments.model)
            path.write_text(f"[[engines]]\ncount = {count}\nmodel = {model}\n")
            config = str(path)
        code = trio.run(main, arguments, config)
    sys.exit(code)
