"""Pins to engines that do not exist, as users of other routers met them; by report id."""

# ruff: noqa: N802 - a report's number is written as its list writes it

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.errors import RequestRejected
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config

OUT_OF_RANGE = ["engine-9", "engine--1", "-1", "9", "engine", ""]


@pytest.mark.parametrize("pin", OUT_OF_RANGE)
async def test_L09_a_pin_out_of_range_is_the_callers_mistake_and_names_the_range(
    pin: str, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("echo", count=4)) as cluster:
        with pytest.raises(RequestRejected) as caught:
            await cluster.client.complete("hi", engine=pin)
        assert caught.value.http_status == 400
        assert not caught.value.retryable
        for engine in ("engine-0", "engine-1", "engine-2", "engine-3"):
            assert engine in str(caught.value)
        check_idle(cluster)


async def test_L10_a_pin_out_of_range_harms_neither_coordinator_nor_other_requests(
    make_config: Callable[..., Config],
) -> None:
    async with open_cluster(make_config("echo", count=4)) as cluster:
        async with cluster.client.generate("bystander", engine="engine-3") as stream:
            for pin in OUT_OF_RANGE:
                with pytest.raises(RequestRejected):
                    await cluster.client.complete("hi", engine=pin)
            assert "".join([output.text async for output in stream]) == "bystander"
        for number in range(4):
            name = f"engine-{number}"
            assert (await cluster.client.complete("hi", engine=name)).engine.name == name
        check_idle(cluster)
        assert cluster.audit() == ()
