"""An engine in a process that a zygote has forked: it serves, and ends as it is told."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

import pytest
from attrs import asdict

from dpkit.errors import ModelNotFound
from dpkit.launch.zygote import open_zygote
from dpkit.wire.structs import FinishCode
from dpkit.wire.zsocket import open_context
from tests.link.lab import LIMITS, ask
from tests.link.owner import open_owner

if TYPE_CHECKING:
    from typing import Any

COST = {"model": "cost:h100-8b", "dtype": "auto", "quant": "none"}


def job(handshake: str) -> dict[str, Any]:
    return {
        "handshake": handshake,
        "rank": 0,
        "name": "e0#2",
        "limits": asdict(LIMITS),
        "threads": 1,
        "kv_publish_delta": 0.02,
        "max_message": 2**20,
        "log_level": logging.WARNING,
    }


async def test_a_forked_engine_serves_until_sigterm_and_aborts_what_is_left() -> None:
    async with (
        open_context() as context,
        open_owner(context) as owner,
        open_zygote("dpkit.launch.child:prepare", COST, name="cost") as zygote,
        zygote.open_worker(
            "dpkit.launch.child:work", job(owner.handshake.endpoint), name="e0#2"
        ) as worker,
    ):
        (told,) = await owner.welcome()
        assert told.instance_id == "e0#2"
        (frontend,) = owner.frontends
        frontend.say(ask("a", max_tokens=2))
        assert len(await frontend.entries("a")) == 2
        frontend.say(ask("b", max_tokens=250, ignore_eos=True))
        await frontend.counts(running=1, waiting=0)
        worker.send_signal(signal.SIGTERM)
        *_, last = await frontend.entries("b")
        assert last.finish_reason is FinishCode.ABORT
        assert await worker.wait() == 0


async def test_a_model_that_is_not_there_is_the_zygotes_error() -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        async with open_zygote(
            "dpkit.launch.child:prepare", COST | {"model": "./nowhere"}, name="nowhere"
        ):
            raise AssertionError("it is there")
