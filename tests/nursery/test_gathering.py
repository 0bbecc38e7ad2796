"""Where a group of engines meets: what breaks its coordinator is told to all who are there."""

from __future__ import annotations

import pytest
import trio
import zmq

from dpkit.errors import ClusterClosed, InternalError
from dpkit.nursery.gathering import Gathering
from dpkit.wire.codec import encode_envelope
from dpkit.wire.structs import Envelope
from dpkit.wire.zsocket import open_context, open_zsocket


async def break_down(error: Exception) -> None:
    """Have the coordinator of a group raise when its first wave begins, and wait for that."""

    def on_waves(_: int, runs: bool) -> None:
        if runs:
            raise error

    gathering = Gathering(bind=lambda: ("tcp://127.0.0.1:*",) * 3, interval=0.1, on_waves=on_waves)
    gathering.ranks = {0}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gathering.run)
        async with gathering.attend(0) as round_, open_context() as context:
            address = round_.addresses.back_output
            async with open_zsocket(context, zmq.PUSH, connect=address) as engine:
                engine.send_nowait(encode_envelope(Envelope(0, start_wave=0)))
                with trio.fail_after(5):
                    try:
                        await round_.wait_for_fault()
                    finally:
                        nursery.cancel_scope.cancel()


async def test_a_bug_in_its_coordinator_is_told_as_one() -> None:
    broke = "the coordinator of engines that step together broke down: KeyError: 'a bug'"
    with pytest.raises(ExceptionGroup) as caught:
        await break_down(KeyError("a bug"))
    (bug,) = caught.value.exceptions
    assert isinstance(bug, InternalError)
    assert str(bug) == broke


async def test_what_the_world_does_to_it_is_told_as_it_is() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await break_down(ClusterClosed("it is closed"))
    assert str(caught.value.exceptions[0]) == "it is closed"
