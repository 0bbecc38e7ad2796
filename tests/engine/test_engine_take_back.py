"""An engine gives up what it does not run, and nothing else, whenever it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import GenerateRequest

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


def test_what_waits_is_given_up_and_what_runs_is_not(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_seqs=1)
    for name in ("a", "b", "c"):
        core.add(ask(name, max_tokens=2))
    batch = core.schedule()
    assert batch is not None
    assert core.take_back(["c", "a", "nobody", "b"]) == ["c", "b"], "in the middle of a step too"
    core.check()
    assert [output.request_id for output in core.apply(batch, core.model.execute(batch, None))] == [
        "a"
    ]
    core.step()
    core.check()
    assert not core.has_requests()
    done = core.statistics()
    counts = (done.requests_finished, done.requests_aborted, done.requests_taken_back)
    assert counts == (1, 0, 2), "it did not abort them"


def test_what_was_preempted_is_given_up(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(num_blocks=4, block_size=4)
    core.add(ask("old", 8, max_tokens=8))
    core.add(ask("new", 8, max_tokens=8))
    while not core.statistics().preemptions:
        core.step()
    assert core.take_back(["old", "new"]) == ["new"]
    core.check()
    while core.has_requests():
        core.step()
    assert core.statistics().requests_finished == 1
    assert core.statistics().requests_taken_back == 1
    assert core.statistics().free_blocks == 4
