"""What an engine's frontends are told: who, when, in which envelope, and how it ends."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from dpkit.errors import WireError
from dpkit.wire.codec import Abort, Add, Utility, encode_input
from dpkit.wire.reports import report_from_wire
from dpkit.wire.structs import FinishCode, SchedulerStats, UtilityAnswer, UtilityCall
from tests.link.lab import RANK, STEP_S, Timed, ask, open_desk

if TYPE_CHECKING:
    from tests.link.lab import Desk

STOP, LENGTH, ABORT, ERROR = FinishCode.STOP, FinishCode.LENGTH, FinishCode.ABORT, FinishCode.ERROR


async def steps(count: float) -> None:
    """Let so many steps pass, and end between two."""
    await trio.sleep(count * STEP_S)
    await wait_all_tasks_blocked()


async def test_the_outputs_of_a_step_go_to_a_frontend_in_one_envelope(autojump_clock) -> None:
    async with open_desk() as desk:
        for name in ("a", "b"):
            desk.say(0, ask(name, max_tokens=2))
        desk.say(1, ask("c", max_tokens=1))
        await steps(2.5)
        first = [envelope.outputs for envelope in desk.envelopes(0) if envelope.outputs]
        assert [[entry.request_id for entry in outputs] for outputs in first] == [["a", "b"]] * 2
        assert desk.told(1) == [("c", (1,), LENGTH)]
        assert desk.finished(0) == ["a", "b"]
        assert desk.finished(1) == ["c"]


async def test_every_envelope_says_how_the_engine_does_and_none_is_empty(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", max_tokens=2))
        await steps(3)
        for index in (0, 1):
            for envelope in desk.envelopes(index):
                assert envelope.engine_index == RANK
                assert envelope.scheduler_stats is not None
                assert envelope.finished_requests != []
                assert envelope.timestamp > 0
        changes = 3  # it waits, it runs, it is gone
        assert [envelope.outputs for envelope in desk.envelopes(1)] == [[]] * changes


async def test_changed_counts_go_to_every_frontend_and_to_the_coordinator(autojump_clock) -> None:
    async with open_desk(coordinator=True) as desk:
        for number in range(3):
            desk.say(0, ask(f"r{number}", max_tokens=1))
        await steps(2)
        changes = [(0, 3), (0, 0)]  # running and waiting: before the step, and after it
        for envelopes in (desk.counted, desk.envelopes(0), desk.envelopes(1)):
            stats = [envelope.scheduler_stats for envelope in envelopes]
            counts = [(s.num_running_reqs, s.num_waiting_reqs) for s in stats if s is not None]
            assert counts == changes
        assert all(envelope.engine_index == RANK for envelope in desk.counted)
        assert not any(envelope.outputs for envelope in desk.counted)


async def test_an_abort_is_acknowledged_without_an_output(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("running"))
        await steps(1.5)
        desk.say(0, ask("queued"))
        desk.say(0, Abort(("running", "queued", "unknown")))
        assert desk.finished(0) == ["queued"]  # the engine had not heard of it
        before = desk.told(0)
        await steps(1)
        assert desk.finished(0) == ["queued", "running"]
        assert desk.told(0) == before
        assert desk.loop.core.get_request_counts() == (0, 0)


async def test_nobody_aborts_requests_of_another_frontend(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", max_tokens=2))
        await steps(0.5)
        desk.say(1, Abort(("a",)))
        await steps(2)
        assert desk.told(0) == [("a", (1,), None), ("a", (2,), LENGTH)]
        assert desk.finished(1) == []


async def test_an_id_that_comes_anew_after_its_abort_is_a_new_request(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        await steps(0.5)
        desk.say(0, Abort(("a",)))
        desk.say(0, ask("a", (7, 8), max_tokens=1))
        await steps(2)
        assert desk.told(0) == [("a", (7,), LENGTH)]
        assert desk.finished(0) == ["a"]


async def test_an_id_of_another_frontend_is_refused_and_the_other_goes_on(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", max_tokens=2))
        await steps(0.5)
        desk.say(1, ask("a", (9,)))
        assert desk.told(1) == [("a", (), ERROR)]
        assert desk.finished(1) == ["a"]
        await steps(2)
        assert desk.told(0) == [("a", (1,), None), ("a", (2,), LENGTH)]


async def test_an_id_that_a_frontend_uses_twice_ends_both_once(autojump_clock) -> None:
    """It cannot tell the two apart: the error for the second is the end of the first."""
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        await steps(0.5)
        desk.say(0, ask("a", (9,)))
        await steps(2)
        assert desk.told(0) == [("a", (), ERROR)]
        assert desk.finished(0) == ["a"]
        assert desk.loop.core.get_request_counts() == (0, 0)


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (ask("a", ()), "the prompt is empty"),
        (ask("a", (1,), max_tokens=1000), "need room for 1000 tokens"),
        (Add(replace(ask("a").request, mm_features=[1])), "mm_features"),
        (Add(replace(ask("a").request, sampling_params=None)), "no sampling_params"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_words(autojump_clock, add, said) -> None:
    async with open_desk() as desk:
        desk.say(0, add)
        await wait_all_tasks_blocked()
        (entry,) = (entry for envelope in desk.envelopes(0) for entry in envelope.outputs)
        assert entry.finish_reason is ERROR
        assert entry.error is not None
        assert entry.error.code == "validation_error"
        assert said in entry.error.message
        assert not entry.error.retryable
        assert desk.finished(0) == ["a"]


async def test_a_request_that_is_to_be_aborted_at_once_is(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, Add(replace(ask("a").request, abort_immediately=True)))
        assert desk.told(0) == [("a", (), ABORT)]
        assert desk.finished(0) == ["a"]


async def test_the_token_that_stopped_a_request_is_named(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", stop_token_ids=(2,)))
        desk.say(0, ask("b"))
        await steps(5)
        last = [
            (entry.request_id, entry.finish_reason, entry.stop_reason)
            for envelope in desk.envelopes(0)
            for entry in envelope.outputs
            if entry.finish_reason is not None
        ]
        assert last == [("a", STOP, 2), ("b", STOP, None)]


# --- utility calls


@pytest.mark.parametrize(
    ("method", "args", "value"),
    [
        ("get_supported_tasks", (), ["generate"]),
        ("is_sleeping", (), False),
        ("is_scheduler_paused", (), False),
        ("resume_scheduler", (), None),
        ("reset_prefix_cache", (False, False), True),
        ("pause_generation", ("abort", True), None),
        ("dpkit_progress", (), [0, None]),
    ],
)
async def test_a_call_is_answered_at_once_by_itself(autojump_clock, method, args, value) -> None:
    async with open_desk() as desk:
        answer = desk.call(1, method, *args)
        assert answer is not None
        assert (answer.call_id, answer.failure_message) == (7, None)
        assert answer.result == (None, value)
        (envelope,) = desk.envelopes(1)
        assert envelope.scheduler_stats is None
        assert not desk.sent[0]


@pytest.mark.parametrize(
    ("method", "args", "why"),
    [
        ("sleep", (1, "abort"), "no such method"),
        ("is_sleeping", (1,), "TypeError"),
        ("pause_generation", ("keep", True), "'abort' or 'wait', not 'keep'"),
        ("pause_generation", (1, 2, 3), "TypeError"),
    ],
)
async def test_a_call_that_cannot_be_served_fails_in_words(
    autojump_clock, method, args, why
) -> None:
    async with open_desk() as desk:
        answer = desk.call(0, method, *args)
        assert answer is not None
        failure = answer.failure_message or ""
        assert failure.startswith(f"Call to {method} method failed: ")
        assert why in failure
        assert answer.result is None


async def test_progress_is_told_in_the_middle_of_a_step(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        await steps(2.25)
        answer = desk.call(0, "dpkit_progress")
        assert answer is not None
        assert answer.result == (None, [2, pytest.approx(0.25)])


def _refusal(desk: Desk, index: int) -> Any:
    (entry,) = desk.envelopes(index)[-1].outputs
    return entry.error


async def test_a_pause_that_aborts_ends_all_and_is_answered_when_the_engine_is_free(
    autojump_clock,
) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        desk.say(1, ask("b"))
        await steps(0.5)
        assert desk.call(0, "pause_generation", "abort", True) is None  # a step is under way
        assert desk.told(0) == [("a", (), ABORT)]
        assert desk.told(1) == [("b", (), ABORT)]
        desk.say(1, ask("c"))
        assert _refusal(desk, 1).code == "engine_paused"
        assert _refusal(desk, 1).retryable
        await steps(1)
        assert any(envelope.utility_output for envelope in desk.envelopes(0))
        assert desk.call(0, "is_scheduler_paused") == UtilityAnswer(7, None, (None, True))
        assert desk.call(0, "resume_scheduler") == UtilityAnswer(7, None, (None, None))
        desk.say(1, ask("d", max_tokens=1))
        await steps(1.5)
        assert desk.told(1)[-1] == ("d", (1,), LENGTH)


async def test_a_pause_that_waits_lets_requests_finish(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", max_tokens=2))
        assert desk.call(1, "pause_generation", "wait", False) is None  # it is in the inbox
        desk.say(0, ask("b"))
        assert _refusal(desk, 0).code == "engine_paused"
        await steps(1.5)
        assert not any(envelope.utility_output for envelope in desk.envelopes(1))
        await steps(1)
        assert desk.told(0)[-1] == ("a", (2,), LENGTH)
        assert [e.utility_output.result for e in desk.envelopes(1) if e.utility_output] == [
            (None, None)
        ]


async def test_a_pause_that_is_ended_while_it_waits_is_answered(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        desk.call(0, "pause_generation", "wait")
        desk.call(1, "resume_scheduler")
        assert any(envelope.utility_output for envelope in desk.envelopes(0))


# --- ends


async def test_F03_a_stop_aborts_all_refuses_what_comes_and_ends_the_loop(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("running"))
        await steps(1.5)
        desk.say(1, ask("queued"))
        desk.frontends.stop()
        assert desk.told(0)[-1] == ("running", (), ABORT)
        assert desk.told(1) == [("queued", (), ABORT)]
        desk.say(1, ask("late"))
        assert desk.told(1)[-1] == ("late", (), ABORT)
        desk.say(0, Utility(UtilityCall(0, 9, "is_sleeping")))
        answer = desk.envelopes(0)[-1].utility_output
        assert answer == UtilityAnswer(9, "Server shutting down")
        await desk.loop.ended.wait()
        assert desk.finished(0) == ["running"]
        assert desk.finished(1) == ["queued", "late"]
        assert desk.loop.core.get_request_counts() == (0, 0)


async def test_a_fatal_error_is_told_to_every_request_and_then_to_every_frontend(
    autojump_clock,
) -> None:
    async with open_desk(model=Timed(fail_at=2)) as desk:
        desk.say(0, ask("a"))
        await steps(0.5)
        desk.say(0, ask("b"))
        await desk.loop.ended.wait()
        await wait_all_tasks_blocked()
        assert desk.told(0) == [("a", (1,), None), ("a", (), ERROR), ("b", (), ERROR)]
        for entry in desk.envelopes(0)[-1].outputs:
            assert entry.error is not None
            assert entry.error.code == "engine_lost"
            assert "boom" in entry.error.message
            assert entry.error.retryable
        assert desk.is_dead(0)
        assert desk.is_dead(1)


async def test_who_comes_in_place_of_a_frontend_hears_nothing_of_what_that_asked(
    autojump_clock,
) -> None:
    """A frontend of vLLM's fails at an answer to a call that it has not made."""
    async with open_desk() as desk:
        desk.say(0, ask("a", range(40)))
        desk.say(1, ask("b", range(40)))
        await trio.sleep(1.5)
        assert desk.call(0, "pause_generation", "wait") is None
        desk.say(0, Abort(("a",)))
        desk.frontends.forget(0)
        desk.frontends.back(0)
        desk.sent[0].clear()
        await trio.sleep(100)
        assert [finish for name, _, finish in desk.told(1) if name == "b"][-1] == FinishCode.STOP
        assert not any(desk.loop.core.get_request_counts())
        assert desk.finished(0) == []
        assert [each for each in desk.envelopes(0) if each.utility_output is not None] == []
        assert desk.call(0, "is_scheduler_paused") == UtilityAnswer(7, None, (None, True))


async def test_requests_of_a_frontend_that_has_gone_are_dropped(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        desk.say(1, ask("b", max_tokens=3))
        await steps(1.5)
        told = len(desk.sent[0])
        desk.frontends.forget(0)
        await steps(3)
        assert len(desk.sent[0]) == told
        assert desk.told(1)[-1] == ("b", (3,), LENGTH)
        assert desk.loop.core.get_request_counts() == (0, 0)
        desk.frontends.back(0)
        desk.say(0, ask("a", max_tokens=1))
        await steps(2)
        assert desk.told(0)[-1] == ("a", (1,), LENGTH)


@pytest.mark.parametrize("frames", [[], [b"\x00"], [b"\x00", b"\xc1"], [b"\x09", b"\x90"]])
async def test_what_cannot_be_read_ends_its_frontend_and_no_other(autojump_clock, frames) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a"))
        desk.say(1, ask("b", max_tokens=2))
        await steps(0.5)
        with pytest.raises(WireError) as caught:
            desk.frontends.receive(0, frames)
        desk.frontends.expel(0, caught.value)
        assert desk.told(0) == [("a", (), ERROR)]
        assert desk.is_dead(0)
        await steps(3)
        assert desk.is_dead(0)  # and nothing came after it
        assert desk.told(1)[-1] == ("b", (2,), LENGTH)
        assert desk.loop.core.get_request_counts() == (0, 0)


async def test_an_array_in_a_frame_of_its_own_is_no_reason_to_refuse(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.frontends.receive(0, [*encode_input(ask("a", max_tokens=1)), b"nobody refers to it"])
        await steps(2)
        assert desk.told(0) == [("a", (1,), LENGTH)]


async def test_each_frontend_is_told_how_many_of_its_requests_are_reckoned_with(
    autojump_clock,
) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", max_tokens=3))
        await steps(0.5)
        desk.say(0, ask("b", max_tokens=3))
        desk.say(0, ask("b", max_tokens=3))  # twice the same id: it is refused, and has come
        desk.say(1, ask("c", max_tokens=3))
        await steps(3)

        def counts(index: int) -> list[tuple[int, int]]:
            stats = [envelope.scheduler_stats for envelope in desk.envelopes(index)]
            told = [report_from_wire(each) for each in stats if each is not None]
            return [(each.sent, each.acknowledged) for each in told if each is not None]

        assert counts(0)[:3] == [(1, 1), (3, 1), (3, 1)]
        assert counts(0)[-1] == (3, 3)
        assert counts(1)[0] == (0, 0)
        assert counts(1)[-1] == (1, 1)
        desk.frontends.forget(0)
        desk.frontends.back(0)
        desk.say(0, ask("d", max_tokens=1))
        await steps(3)
        assert counts(0)[-1] == (1, 1), "whoever comes anew counts anew"


async def test_a_long_prompt_is_told_of_as_it_is_computed(autojump_clock) -> None:
    async with open_desk() as desk:
        desk.say(0, ask("a", prompt=range(150), max_tokens=3))  # 64 tokens a step
        await steps(5)
        for index in (0, 1):
            told = [
                report_from_wire(e.scheduler_stats or SchedulerStats())
                for e in desk.envelopes(index)
            ]
            left = [each.unprefilled_tokens for each in told if each is not None]
            assert left[:4] == [150, 86, 22, 0]
            assert len(left) == (6 if index == 0 else 5), (
                "the end, and for whoever has it each token"
            )
