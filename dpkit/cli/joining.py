"""What to say of engines that join: with which commands to start them, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.config.checks import host_and_port
from dpkit.config.rules import has_weights
from dpkit.config.units import show_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.config.schema import EngineGroupConfig


def address(group: EngineGroupConfig) -> tuple[str, str]:
    """Host and port as engines are given them; a port that is picked is ``PORT``."""
    host, port = host_and_port(group.vllm.handshake or "")
    return group.vllm.host or host, "PORT" if port == "*" else port


def commands(file: str, group: EngineGroupConfig, first: int) -> list[str]:
    """What to start where the engines are to be: all of them at one place, or one by itself.

    Args:
        file: Of the config.
        group: That joins.
        first: How many engines the groups before it have.
    """
    host, port = address(group)
    if not has_weights(group.model):  # vLLM has no such model
        ranks = " ".join(map(str, range(first, first + group.count)))
        engine = f'dpkit engine --config {file} --rank "$RANK" --handshake tcp://{host}:{port}'
        engine += " --redial 10s"
        return [f"for RANK in {ranks}; do {engine} & done; wait"]
    where = f"--data-parallel-address {host.strip('[]')} --data-parallel-rpc-port {port}"
    start = f"vllm serve {group.model} --headless --data-parallel-size {group.count}"
    whole = f"{start} --data-parallel-size-local {group.count} {where}"
    single = f"{start} --data-parallel-size-local 1 --data-parallel-start-rank RANK {where}"
    return [whole] if group.count == 1 else [whole, single]


def how_to_start(group: EngineGroupConfig, start_with: Sequence[str]) -> Iterator[str]:
    """Line by line; the commands have lines of their own, to be copied."""
    host, port = address(group)
    each = "It joins" if group.count == 1 else "They join"
    yield (
        f"  {each} at tcp://{host}:{port}, whenever somebody starts {_them(group)}; a start waits "
        f"{show_duration(group.vllm.join_timeout)} for {_them(group)}. Memory, steps and the "
        "length of a request are as the engine says when it joins."
    )
    if port == "PORT":
        yield '  The port is picked at the start; log.level = "info" tells it.'
    first, *others = start_with
    meets_at = group.vllm.rendezvous
    if meets_at is not None:
        yield f"  Rank 0 is to be where {meets_at} is, and the four ports after that must be free."
    yield "  Where it is to be, and the model called as it is called there, start"
    yield f"    {first}"
    so_that = ", so that one that dies takes no other with it" if meets_at is None else ""
    for other in others:
        yield f"  or, for each RANK from 0 to {group.count - 1}{so_that},"
        yield f"    {other}"


def on_loss(group: EngineGroupConfig) -> str:
    """When an engine counts as lost, and what is done then."""
    lost = (
        "an engine is lost when its connection drops, when it says so, or when it leaves a "
        f"question unanswered for {show_duration(group.vllm.dead_after)}."
    )
    if group.vllm.rendezvous is not None:
        return (
            f"{lost} All others are lost with it, as they step together, and all are waited for, "
            "for as long as it takes: whoever runs them ends those that are left, and starts all "
            "again."
        )
    return f"{lost} It is waited for, for as long as it takes: whoever runs it starts it again."


def _them(group: EngineGroupConfig) -> str:
    return "it" if group.count == 1 else "them"
