"""Over whatever transport and however started: what local engines give, token by token.

The text of a process is that of an engine in this process, and so is all that is told beside it.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.checkpoint.locate import fetched_path
from dpkit.config.load import parse_config
from dpkit.errors import DpkitError
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.conformance import check_link
from dpkit.testing.idle import check_idle
from dpkit.testing.tiny import write_tiny_directory
from tests.clusters import is_idle, make_config
from tests.processes.lab import group, life_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from dpkit.abc import EngineLink
    from dpkit.config.schema import Config
    from dpkit.messages import Completion
    from dpkit.nursery.client import Client
    from dpkit.nursery.inbox import Deliver

PLAIN = pytest.param("fork", "ipc")
EVERY_WAY = [
    PLAIN,
    pytest.param("fork", "tcp"),
    pytest.param("spawn", "ipc"),
    pytest.param("spawn", "tcp"),
]
RARELY = [PLAIN, *(pytest.param(*each.values, marks=pytest.mark.slow) for each in EVERY_WAY[1:])]

PROMPT = "Once upon a time there was a "
ASKED: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.9, "seed": -7},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 2, "temperature": 0.5},
    {"stop": [" a", "upon", "e"], "min_tokens": 3},
    {"stop_token_ids": [32, 97], "min_tokens": 2},
    {"ignore_eos": True},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {65: 5.0, 66: -100.0}, "temperature": 0.7, "seed": 2**64 - 1},
    {"echo": True, "logprobs": 1},
    {"n": 3, "temperature": 0.8, "seed": 3},
    {"cache_salt": "mine", "priority": -3, "tenant": "t", "resume": True, "timeout": 60},
    {"max_tokens": 10**7},  # more than fits: refused, in the same words
    {"logit_bias": {10**6: 1.0}},  # a token that there is not
)


async def answers(client: Client, tokens: int, *, at_once: bool) -> list[object]:
    """What comes of all that is asked; without what differs by nature."""
    found: dict[int, object] = {}

    async def ask(number: int, options: dict[str, Any]) -> None:
        own: dict[str, Any] = {"max_tokens": tokens, "request_id": f"r{number}", "seed": number}
        try:
            completions = await client.complete_many(PROMPT, **(own | options))
        except DpkitError as error:
            found[number] = type(error), str(error)
        else:
            found[number] = [_comparable(each) for each in completions]

    async with trio.open_nursery() as nursery:
        for number, options in enumerate(ASKED):
            if at_once:
                nursery.start_soon(ask, number, options)
            elif "n" not in options:  # whose choices may share a step, or not
                await ask(number, options)
    return [found[number] for number in sorted(found)]


def _comparable(completion: Completion) -> tuple[object, ...]:
    """Logprobs as nearly the same: their last bits depend on who shared the step.

    What was cached depends on when, so it is left out.
    """
    told = [
        (
            each.token_id,
            each.rank,
            [token for token, _ in each.top],
            pytest.approx(each.logprob, abs=1e-3),
        )
        for each in (*completion.logprobs, *completion.prompt_logprobs)
    ]
    bare = evolve(
        completion, cached_tokens=None, ttft_s=0, latency_s=0, logprobs=(), prompt_logprobs=()
    )
    return bare, told


async def _stream_half(client: Client) -> str:
    """Read a stream up to its third token, and leave."""
    async with client.generate(PROMPT, max_tokens=400, ignore_eos=True) as stream:
        while len(stream.token_ids) < 3:
            await stream.__anext__()
    return stream.text


async def check_same(
    config_of: Callable[[str], Config], *, tokens: int = 24, at_once: bool = True
) -> None:
    """Compare two kinds of one config."""
    async with open_cluster(config_of("local")) as cluster:
        expected = await answers(cluster.client, tokens, at_once=at_once)
    async with open_cluster(config_of("process")) as cluster:
        assert await answers(cluster.client, tokens, at_once=at_once) == expected
        text = await _stream_half(cluster.client)
        await until(lambda: is_idle(cluster))
        check_idle(cluster)
        totals = [each.totals for each in cluster.statistics().engines]
    assert len(text) >= 3
    assert sum(each.requests for each in totals) > len(expected) - 2, "two were refused"


def _configs(start: str, transport: str, model: str, more: str = "") -> Callable[[str], Config]:
    table = group(
        model=model,
        process=f'start = "{start}", transport = "{transport}"',
        more=f"kv.num_blocks = 200\n{more}",
    )
    return lambda kind: parse_config(
        table.replace('kind = "process"', f'kind = "{kind}"'), overrides=["cluster.seed=1"]
    )


@pytest.mark.parametrize(("start", "transport"), EVERY_WAY)
async def test_echoes_are_what_local_engines_give(start: str, transport: str) -> None:
    await check_same(_configs(start, transport, "echo"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with one thread: tests share the machine, and threads that wait for others spin."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})


@pytest.mark.slow  # the demo model's test asks the same, where that is to be had
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("start", "transport"), EVERY_WAY)
async def test_what_weights_give_is_what_local_engines_give(
    start: str, transport: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    path = write_tiny_directory(tmp_path / "tiny", tie_word_embeddings=False)
    await check_same(_configs(start, transport, str(path), 'dtype = "float32"'))


@pytest.mark.model
@pytest.mark.timeout(120)  # weights are read twice, and there is much that is asked
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("start", "transport"), RARELY)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_the_demo_model_says_the_same(start: str, transport: str, dtype: str) -> None:
    if not fetched_path("smollm2-135m").is_dir():
        pytest.skip("THE DEMO MODEL IS NOT HERE: `dpkit fetch smollm2-135m` gets it")
    config = _configs(start, transport, "smollm2-135m", f'dtype = "{dtype}"')
    # In bfloat16 the text, too, depends on who shared a step: there, nobody does.
    await check_same(config, tokens=6, at_once=dtype == "float32")


@pytest.mark.parametrize(
    ("start", "transport"), [PLAIN, pytest.param("spawn", "tcp", marks=pytest.mark.slow)]
)
async def test_a_link_to_a_process_conforms(start: str, transport: str) -> None:
    def open_link(deliver: Deliver) -> AbstractAsyncContextManager[EngineLink]:
        return _open_link(start, transport, deliver)

    await check_link(open_link)


@asynccontextmanager
async def _open_link(start: str, transport: str, deliver: Deliver) -> AsyncIterator[EngineLink]:
    config = make_config(group(process=f'start = "{start}", transport = "{transport}"'))
    async with open_cluster(config) as cluster:
        yield life_of(cluster, "e-0").link(deliver)
