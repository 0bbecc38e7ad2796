"""A model that fails in its process: it raises, exits, crashes, or is killed while it loads."""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import (
    ClusterNotStarted,
    EngineLost,
    LaunchFailed,
    ModelNotFound,
    ModelUnsupported,
)
from dpkit.launch.zygote import Zygote
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from tests.clusters import make_config, told
from tests.processes.lab import SUPERVISION, group, kill, open_processes, pid_of, wait_back
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.nursery.client import Client

NO_RESTART = SUPERVISION.replace("intensity = 1000", "intensity = 0")
ALL_OF_FOUR = "cluster = { min_ready = 4 }"


FAILURES = {
    "raise": ("RuntimeError: this model broke", "exited with status 1"),
    "exit": ("exited with status 3", "exited with status 3"),
    "segv": ("was killed by SIGSEGV", "was killed by SIGSEGV"),
    "abort": ("was killed by SIGABRT", "was killed by SIGABRT"),
}
"""By what the model is told to do: what its request hears, and what the log says in the end."""


async def test_E07_a_model_that_fails_costs_its_engine_only_and_says_how_it_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_processes(group(model="Obedient", count=2)) as cluster:
        for life, (order, (how, end)) in enumerate(FAILURES.items()):
            caplog.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_echo, cluster.client, "what the other engine has", "e-1")
                stream = cluster.client.generate(f"{order}:abcdefgh", engine="e-0")
                with pytest.raises(EngineLost, match=how):
                    async with stream:
                        await stream.read_all()
            assert order[:2].startswith(stream.text), "what was last may die on its way"
            await wait_back(cluster, "e-0", life + 1)
            await _echo(cluster.client, "hello", "e-0")
            lost = told(cluster, EventKind.ENGINE_LOST)
            ready = told(cluster, EventKind.ENGINE_READY, of="e-0")[-1].detail
            assert ready.startswith(f"restart {life + 1}, process {pid_of(cluster, 'e-0')}, ")
            assert how in lost[life].detail
            assert order != "segv" or 'models.py", line ' in lost[life].detail, "in whose call"
            assert end in caplog.text


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_a_lost_engine_says_the_same_of_each_request_wherever_it_lives(kind: str) -> None:
    said: list[str] = []
    config = make_config(group(model="Obedient").replace('"process"', f'"{kind}"'))
    async with open_cluster(config) as cluster, trio.open_nursery() as nursery:

        async def ask(prompt: str) -> None:
            with pytest.raises(EngineLost) as caught:
                await cluster.client.complete(prompt)
            said.append(str(caught.value))

        for prompt in ("waits without end" * 100, "raise:abcdefgh"):
            nursery.start_soon(ask, prompt)
    assert sorted(said) == [
        f"engine e-0 was lost while it held request dpkit-0-{n}: RuntimeError: this model broke"
        for n in (1, 2)
    ]


async def test_E04_G02_of_an_engine_that_never_comes_up_the_first_error_is_shown() -> None:
    config = make_config(
        group(model="BreaksInAllocate", supervision='intensity = 2, backoff = "1ms"')
    )
    with pytest.raises(
        ClusterNotStarted,
        match=r"exited with status 1; its last words: .*no memory, life 0 / in engine e-0, all",
    ):
        async with open_cluster(config):
            pytest.fail("an engine that cannot allocate is not ready")


@pytest.mark.parametrize("kind", ["local", "process"])
@pytest.mark.parametrize("level", ["warning", "debug"])
async def test_what_is_no_bug_is_told_in_words_and_traced_only_at_debug(
    caplog: pytest.LogCaptureFixture, kind: str, level: str
) -> None:
    caplog.set_level(level.upper(), "dpkit")
    toml = group(model="Oversized", supervision=NO_RESTART, more="kv.num_blocks = 4")
    config = make_config(
        toml.replace('"process"', f'"{kind}"'), settings=f'log = {{ level = "{level}" }}'
    )
    with pytest.raises(ClusterNotStarted, match=r"OutOfMemory: 64 tokens do not fit"):
        async with open_cluster(config):
            pytest.fail("its cache does not fit")
    assert ("Traceback" in caplog.text) == (level == "debug")


@pytest.mark.parametrize("victim", [0, 1, 3])
async def test_F09_G06_G07_whoever_is_killed_before_it_is_ready_is_missed_at_once(
    victim: int, flags: Path
) -> None:
    """The first, one in the middle, the last: their pipes must not be held by one another."""
    (flags / "victim").write_text(str(100 + victim))
    groups = [
        group(
            f"e{n}",
            model="DiesInAllocate",
            supervision=NO_RESTART,
            more=f"kv.num_blocks = {100 + n}",
        )
        for n in range(4)
    ]
    began = trio.current_time()
    with pytest.raises(
        ClusterNotStarted, match=rf"e{victim}-0 did not come up: .* killed by SIGKILL"
    ) as caught:
        async with open_cluster(make_config(*groups, settings=ALL_OF_FOUR)):
            pytest.fail("one of four is missing")
    assert isinstance(caught.value.__cause__, LaunchFailed)
    assert trio.current_time() - began < 10, "far before start_timeout, which is five minutes"


async def test_G06_without_min_ready_the_others_serve_and_status_says_why(flags: Path) -> None:
    (flags / "victim").write_text("101")
    groups = [
        group(
            f"e{n}",
            model="DiesInAllocate",
            supervision=NO_RESTART,
            more=f"kv.num_blocks = {100 + n}",
        )
        for n in range(3)
    ]
    async with open_processes(*groups) as cluster:
        states = [slot.state for slot in cluster._slots]
        assert states == [EngineState.READY, EngineState.DOWN, EngineState.READY]
        assert "SIGKILL" in str(cluster.statistics().engines[1].last_error)
        assert (await cluster.client.complete("hello")).text == "hello"


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("DiesWhileLoading", LaunchFailed, "was killed by SIGKILL"),
        ("BreaksWhileLoading", ModelUnsupported, "RuntimeError: the file is damaged"),
    ],
)
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_G06_a_model_that_is_lost_while_it_loads_is_no_hang(
    model: str, error: type[Exception], words: str, start: str
) -> None:
    config = make_config(
        group(model=model, count=2, supervision=NO_RESTART, process=f'start = "{start}"')
    )
    with pytest.raises((error, ClusterNotStarted), match=words):
        async with open_cluster(config):
            pytest.fail("there is no model")


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_G04_G05_loading_that_never_ends_fails_at_the_start_timeout(start: str) -> None:
    process = f'start = "{start}", start_timeout = "1200ms"'
    config = make_config(group(model="HangsWhileLoading", supervision=NO_RESTART, process=process))
    with pytest.raises(
        (LaunchFailed, ClusterNotStarted), match=r"within 1\.2 s \(engines.process.start_timeout\)"
    ):
        async with open_cluster(config):
            pytest.fail("there is no model")


async def test_F03_an_engine_that_somebody_else_ends_does_not_finish_its_requests() -> None:
    """SIGTERM of an operator: what the engine then calls aborted is lost, and goes elsewhere."""
    async with open_processes(group(model="Paced", count=2)) as cluster:
        async with trio.open_nursery() as nursery:
            stream = cluster.client.generate("abcdefghijklmnop", engine="e-0")
            with pytest.raises(EngineLost, match="e-0 is shutting down"):
                async with stream:
                    await stream.__anext__()
                    for number in range(4):
                        nursery.start_soon(_echo, cluster.client, f"{number} hello, hello")
                    await until(lambda: list(cluster._flights[0].placed_on(stream.engine))[1:])
                    kill(cluster, "e-0", signal.SIGTERM)
                    await stream.read_all()
        await wait_back(cluster, "e-0", 1)
        causes = cluster.client.statistics().causes
        assert {str(cause): count for cause, count in causes.items() if count} == {
            "stop": 4,
            "engine_lost": 1,
        }


async def _echo(client: Client, prompt: str, engine: str | None = None) -> None:
    completion = await client.complete(prompt, engine=engine, resume=True)
    assert completion.text == prompt


async def test_a_zygote_that_is_killed_takes_its_engines_along_and_all_come_back() -> None:
    async with open_processes(group(count=2)) as cluster:
        [host] = cluster._launchers._hosts.values()
        assert isinstance(host._launcher, Zygote)
        assert host._launcher.pid is not None
        os.kill(host._launcher.pid, signal.SIGKILL)
        for name in ("e-0", "e-1"):
            await wait_back(cluster, name, 1)
        assert (await cluster.client.complete("hello")).text == "hello"


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_a_program_that_is_imported_for_its_model_does_not_open_clusters_without_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_program.py").write_text(BARE_PROGRAM.replace("KIND", kind))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(f'engines = [{{ model = "bare_program:Mine", kind = "{kind}" }}]')
    with pytest.raises(
        ModelUnsupported,
        match=r"'bare_program:Mine': RuntimeError: open_cluster was called while bare_program is "
        r'being imported: .* under `if __name__ == "__main__":`',
    ):
        async with open_cluster(config):
            pytest.fail("the program would run in itself")


async def test_a_class_of_the_program_itself_is_refused_before_anything_is_launched() -> None:
    config = make_config(group(model="__main__:Mine"))
    with pytest.raises(ModelNotFound, match=r"a class in __main__ cannot be found .* move it to a"):
        async with open_cluster(config):
            pytest.fail("no process could find it")


BARE_PROGRAM = """
import trio
from dpkit import open_cluster
from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel

class Mine(EchoModel):
    inline = False

async def main():
    config = '[[engines]]\\nmodel = "bare_program:Mine"\\nkind = "KIND"'
    async with open_cluster(parse_config(config)):
        pass

trio.run(main)
"""
