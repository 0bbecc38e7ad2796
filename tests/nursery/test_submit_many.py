"""Several sinks at once, and what a server asks of a client and a cluster beside requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.errors import Overloaded, RequestRejected
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from dpkit.messages import EngineOutput

ECHO = "[[engines]]\nname = 'e'\nmodel = 'echo'\ncount = 2\n"


async def test_each_sink_gets_what_a_choice_of_generate_many_would() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        outputs: list[list[EngineOutput]] = [[], [], []]
        ended = [trio.Event() for _ in outputs]

        def sink_of(index: int):
            def sink(output: EngineOutput) -> None:
                outputs[index].append(output)
                if output.finish_reason:
                    ended[index].set()

            return sink

        sinks = [sink_of(index) for index in range(3)]
        submissions = cluster.client.submit_many("abc", sinks=sinks, seed=7, request_id="r")
        for event in ended:
            await event.wait()
        streams = cluster.client.generate_many("abc", seed=7, request_id="r", n=3)
        for submission, stream in zip(submissions, streams, strict=True):
            assert submission.request == stream.request
        assert [submission.take_text() for submission in submissions] == ["abc"] * 3
        check_idle(cluster)


async def test_all_are_admitted_or_none() -> None:
    config = parse_config(f"{ECHO}[admission]\nmax_inflight = 1\nmax_queued = 1\n")
    async with open_cluster(config) as cluster:
        heard: list[EngineOutput] = []
        with pytest.raises(Overloaded):
            cluster.client.submit_many("abc", sinks=[heard.append] * 3)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        assert len(cluster.client.submit_many("abc", sinks=[heard.append] * 2)) == 2
        await cluster.drain()
        check_idle(cluster)


async def test_no_sink_that_is_none_is_taken() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        with pytest.raises(TypeError, match="sink must be a callable"):
            cluster.client.submit_many("abc", sinks=[print, 3])  # type: ignore[list-item]
        check_idle(cluster)


async def test_a_client_encodes_and_decodes_as_its_model_does() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        client = cluster.client
        assert client.encode("né") == (110, 195, 169)
        assert client.decode(client.encode("né")) == "né"
        assert client.encode([{"role": "user", "content": "x"}])[:4] == tuple(b"user")
        with pytest.raises(RequestRejected, match="half of a surrogate pair"):
            client.encode("\ud800")


async def test_a_cluster_says_who_is_how_and_what_fits_every_engine() -> None:
    text = (
        f"{ECHO}kv = {{ num_blocks = 10 }}\n"
        "[[engines]]\nname = 'f'\nmodel = 'echo'\nkv = { num_blocks = 4 }\n"
    )
    async with open_cluster(parse_config(text)) as cluster:
        assert cluster.engines == (
            (0, "e-0", EngineState.READY),
            (1, "e-1", EngineState.READY),
            (2, "f-0", EngineState.READY),
        )
        assert cluster.longest == 4 * 16 + 1
        prompt = list(range(60))
        completion = await cluster.client.complete(prompt, max_tokens=5, engine="f-0")
        assert len(completion.token_ids) == 5
        with pytest.raises(RequestRejected):
            await cluster.client.complete(prompt, max_tokens=6, engine="f-0")
