"""Break a promise on purpose, in a copy of the tree, and run the test that must notice.

Usage: ``python tests/planted/plant.py NAME [PYTEST ARGUMENT]...``; exits with pytest's status, so 1
is good news. NAME is a key of `PLANTS`, or ``none``: the copy unchanged, which must pass.

The promises: P1 one outcome, P2 no invention, P3 nothing leaks, P4 bounded, P5 isolated, P6 loud,
P7 ordered end. P8, replayable, is asked of whatever sweep goes red.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NURSERY = "tests/nursery"
SWEEP = f"{NURSERY}/test_cancel_sweep.py"
FAIL_SWEEP = f"{NURSERY}/test_fail_sweep.py"
FAULTS = f"{NURSERY}/test_fault_table.py"
ENDS = f"{NURSERY}/test_request_ends.py"
ARBITER = f"{NURSERY}/test_arbiter.py"
SERVE = "tests/serve"
OBSERVE = "tests/observe"
_GROW = "test_M01_each_engine_has_its_rows_and_they_only_grow"
BENCH = "tests/bench"
JOINED = "tests/joined"
LOCKSTEP = f"{JOINED}/test_lockstep.py"
_LEAVES = "test_D01_the_abort_reaches_the_engine_after_three_tokens"
_LOST = "test_J08_an_engine_lost_in_midstream_is_an_event_and_no_done"
SUBMISSIONS = f"{NURSERY}/test_submission.py"


class Plant(NamedTuple):
    """A patch: `old` stands exactly once in `file`."""

    promise: str
    why: str
    file: str
    old: str
    new: str
    test: str = SWEEP


PLANTS = {
    "await_in_release": Plant(
        "P3",
        "a cancelled reader is cancelled again on its way out, and its engine stays charged",
        "dpkit/nursery/stream.py",
        "    ) -> None:\n        self.close()\n",
        "    ) -> None:\n        await trio.lowlevel.checkpoint()\n        self.close()\n",
    ),
    "grant_kept": Plant(
        "P3",
        "a grant that crosses a cancel stays charged at the arbiter, and its place is lost",
        "dpkit/nursery/arbiter.py",
        "            seat.leave(request_id)\n",
        "            pass\n",
        f"{ARBITER}::test_a_grant_that_crosses_a_cancel_is_given_back_at_once",
    ),
    "kept_at_the_arbiter": Plant(
        "P3",
        "what goes elsewhere counts at the arbiter for ever where it was",
        "dpkit/nursery/flights.py",
        "            self.line.on_released(flight, finished=finished)\n",
        "",
        f"{ARBITER}::test_an_engine_or_the_arbiter_that_dies_at_any_call_leaves_nothing",
    ),
    "checkpoint_after_charge": Plant(
        "P3",
        "a reader cancelled between charge and block never reaches the release",
        "dpkit/nursery/stream.py",
        "        self._flights.begin(self)\n",
        "        self._flights.begin(self)\n        await trio.lowlevel.checkpoint()\n",
    ),
    "deeds_forgotten": Plant(
        "P2",
        "what an engine did goes when it goes, and counters go down",
        "dpkit/nursery/roster.py",
        "            self.departed[slot.rank] = before.plus(slot.totals())\n",
        "            self.departed[slot.rank] = before\n",
        f"{OBSERVE}/test_bug_reports_m.py::{_GROW}",
    ),
    "lives_forgotten": Plant(
        "P2",
        "what an engine did before its restart is told no more",
        "dpkit/nursery/slot.py",
        "        return now if self._past is None else now.plus(self._past)\n",
        "        return now\n",
        f"{OBSERVE}/test_bug_reports_m.py::{_GROW}",
    ),
    "abort_forgotten": Plant(
        "P3",
        "the books are right, but the engine generates for nobody",
        "dpkit/nursery/flights.py",
        "            link.abort(flight.request.request_id)\n",
        "            pass\n",
    ),
    "queue_keeps_aborted": Plant(
        "P3",
        "whoever leaves while waiting keeps the place",
        "dpkit/engine/scheduler.py",
        "            if (request := self.waiting.pop(request_id, None)) is None:\n",
        "            if (request := None) is None:\n",
    ),
    "abort_lost_while_preempted": Plant(
        "P3",
        "whoever leaves while preempted is computed again to the end",
        "dpkit/engine/scheduler.py",
        "        request = self.running.pop(request_id, None)\n",
        "        request = self.waiting.get(request_id)\n"
        "        if request is not None and request.state is Unfinished.PREEMPTED:\n"
        "            return\n"
        "        request = self.running.pop(request_id, None)\n",
    ),
    "interruptible_release": Plant(
        "P3",
        "Ctrl-C on the way out skips the release",
        "dpkit/nursery/stream.py",
        "    @trio.lowlevel.enable_ki_protection  # nor between",
        "    # nor between",
        f"{NURSERY}/test_interrupts.py",
    ),
    "double_release": Plant(
        "P3",
        "a request that waits to be placed anew and is left then is released twice",
        "dpkit/nursery/flights.py",
        "            placement, flight.placement, flight.engine = flight.placement, None, None\n",
        "            placement = flight.placement\n",
        f"{ENDS}::test_who_leaves_while_waiting_for_a_second_place_is_released_once",
    ),
    "retry_without_release": Plant(
        "P3",
        "a request that is placed anew stays charged to the engine that was lost",
        "dpkit/nursery/flights.py",
        "        self._leave_engine(flight)\n        flight.go_elsewhere(",
        "        flight.go_elsewhere(",
        f"{ENDS}::test_a_retried_request_goes_before_those_that_wait",
    ),
    "unshielded_services": Plant(
        "P7",
        "a cancellation from outside ends the engines before the body has cleaned up",
        "dpkit/nursery/services.py",
        "            with trio.CancelScope(shield=True):\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        "            with trio.CancelScope():\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        f"{FAULTS}::test_row_9_every_exit_leaves_nothing_and_comes_out_bare",
    ),
    "lost_engine_is_silent": Plant(
        "P1",
        "requests of a lost engine wait for ever",
        "dpkit/nursery/busyloop.py",
        "deliver(self.engine, failed(request_id, lost(self.engine, request_id, said, cause)))",
        "failed(request_id, lost(self.engine, request_id, said, cause))",
        FAIL_SWEEP,
    ),
    "terminal_event_forgotten": Plant(
        "P1",
        "a request that is aborted ends without an event",
        "dpkit/nursery/flights.py",
        "        self.causes[cause] += 1\n",
        "        self.causes[cause] += 1\n        if cause is Cause.CLIENT:\n            return\n",
        f"{ENDS}::test_every_end_is_told_once_and_alike_by_reader_events_and_statistics",
    ),
    "wrong_terminal_event": Plant(
        "P1",
        "what ends by a stop string in its last token is told by what its engine said",
        "dpkit/nursery/flights.py",
        "cause_of(output, seen)",
        "cause_of(output, output)",
        f"{ENDS}::test_what_ends_by_a_stop_string_in_its_last_token_has_one_cause",
    ),
    "old_step_reaches_new_request": Plant(
        "P2",
        "a step under way answers whoever asks anew by an id that was left",
        "dpkit/nursery/busyloop.py",
        "            if self.inbox.is_aborted(output.request_id):\n",
        "            if False:\n",
        f"{NURSERY}/test_bug_reports.py",
    ),
    "skipped_epoch_check": Plant(
        "P2",
        "late outputs of an engine's former life are delivered as the present one's",
        "dpkit/nursery/flights.py",
        "        if flight is None or (flight.engine is not engine and flight.engine != engine):\n",
        "        if flight is None or not flight.engine or flight.engine.name != engine.name:\n",
        f"{FAULTS}::test_row_5_frames_of_an_old_life_are_counted_and_dropped",
    ),
    "resumption_repeats_a_token": Plant(
        "P2",
        "a request goes on elsewhere from one token too few",
        "dpkit/nursery/flight.py",
        "tuple(self.delivered)",
        "tuple(self.delivered[:-1])",
        FAIL_SWEEP,
    ),
    "retry_budget_forgotten": Plant(
        "P4",
        "when engines die again and again, whatever they lose is placed again",
        "dpkit/balancer/retries.py",
        "        if self._is_made_good or is_kept:\n",
        "        if True:\n",
        f"{NURSERY}/test_retry_budget.py",
    ),
    "queue_timeout_forgotten": Plant(
        "P4",
        "whoever waits for a place may wait for ever",
        "dpkit/nursery/flight.py",
        "    if flight.placement is None and now >= flight.times_out_at:\n",
        "    if False:\n",
        f"{ENDS}::test_a_queue_timeout_is_told_apart_from_a_deadline",
    ),
    "no_deadline_once_placed": Plant(
        "P4",
        "a deadline counts in the queue only",
        "dpkit/nursery/flight.py",
        "        return deadline if self.placement is not None else",
        "        return math.inf if self.placement is not None else",
        f"{ENDS}::test_a_deadline_in_decode_keeps_what_came_and_frees_the_engine",
    ),
    "one_failure_ends_all": Plant(
        "P5",
        "an engine that fails takes its healthy neighbours with it",
        "dpkit/nursery/roster.py",
        "        if isinstance(error, InternalError):",
        "        if isinstance(error, Exception):",
        f"{FAULTS}::test_row_1_an_engine_that_fails_at_any_step_loses_nothing_that_can_be_saved",
    ),
    "sink_fails_its_engine": Plant(
        "P5",
        "a sink that raises takes the engine with it that served it",
        "dpkit/nursery/submission.py",
        "            self._sink(output)\n        except BaseException as error:",
        "            self._sink(output)\n        except ZeroDivisionError as error:",
        f"{SUBMISSIONS}::test_a_sink_that_raises_at_any_call_ends_its_own_request_alone",
    ),
    "sink_called_after_close": Plant(
        "P1",
        "a sink is called though its submission was closed",
        "dpkit/nursery/submission.py",
        "        self._sink = None\n        self._flights.end(self)\n",
        "        self._flights.end(self)\n",
        f"{SUBMISSIONS}::test_who_is_told_because_another_ends_may_close_that_other",
    ),
    "sink_told_before_the_books": Plant(
        "P3",
        "who hears that its request has ended still finds it charged",
        "dpkit/nursery/flights.py",
        "            self._conclude(flight, seen.finish_reason, cause_of(output, seen))\n"
        "        flight.receiver.finish(seen)\n",
        "            flight.receiver.finish(seen)\n"
        "            self._conclude(flight, seen.finish_reason, cause_of(output, seen))\n",
        f"{SUBMISSIONS}::test_the_last_call_finds_the_place_of_its_request_free",
    ),
    "submission_forgotten": Plant(
        "P3",
        "a submission that is closed is computed to its end",
        "dpkit/nursery/submission.py",
        "        self._sink = None\n        self._flights.end(self)\n",
        "        self._sink = None\n",
        f"{NURSERY}/test_submission_sweeps.py",
    ),
    "probe_never_ends": Plant(
        "P5",
        "an engine whose probe was left by its reader is never picked again",
        "dpkit/nursery/flights.py",
        "        if engine is not None and not flight.answered:\n",
        "        if False:\n",
        f"{NURSERY}/test_lives.py::test_a_probe_that_is_left_gives_the_next_request_the_chance",
    ),
    "dropped_in_silence": Plant(
        "P6",
        "late outputs are dropped and not counted",
        "dpkit/nursery/flights.py",
        "            self.late_outputs += 1\n",
        "            pass\n",
        f"{FAULTS}::test_row_5_frames_of_an_old_life_are_counted_and_dropped",
    ),
    "forged_stats": Plant(
        "P6",
        "stats that are older than what is known replace it",
        "dpkit/nursery/fanin.py",
        "_age(stats) <= _age(newest)",
        "_age(stats) > _age(newest)",
        f"{NURSERY}/test_fanin.py",
    ),
    "http_forgets_to_abort": Plant(
        "P3",
        "the client has left, and the engine generates for nobody",
        "dpkit/serve/generation.py",
        "        answer.close()\n",
        "        pass\n",
        f"{SERVE}/test_openai_disconnect.py::{_LEAVES}",
    ),
    "http_loss_looks_complete": Plant(
        "P1",
        "a stream that was cut off ends like one that is whole",
        "dpkit/serve/answers.py",
        "            self.responder.write(self._left() + error_event(told.fields))\n",
        "            self.responder.write(self._left() + self.form.ending(self.usage))\n",
        f"{SERVE}/test_openai_errors.py::{_LOST}",
    ),
    "bench_waits_with_the_server": Plant(
        "P6",
        "a load generator that was kept waiting counts from when it came to send, and hides it",
        "dpkit/bench/record.py",
        "return self.moments[0] - self.intended if self.moments else None",
        "return self.moments[0] - self.began if self.moments else None",
        f"{BENCH}/test_load.py::test_a_generator_that_comes_late_says_so",
    ),
    "bench_counts_the_warm_up": Plant(
        "P2",
        "what a load generator was told to leave out is in its figures",
        "dpkit/bench/summary.py",
        "measured = [record for record in everything if not record.is_warm_up]",
        "measured = everything",
        f"{BENCH}/test_load.py::test_the_warm_up_is_sent_and_left_out",
    ),
    "bench_counts_half_answers": Plant(
        "P2",
        "a stream that was cut off counts as an answer",
        "dpkit/bench/openai.py",
        "if not self._reader.is_done:",
        "if not self._reader.is_done and not self._record.moments:",
        f"{BENCH}/test_openai.py::test_a_stream_without_done_is_no_answer",
    ),
    "answered_alone": Plant(
        "P4",
        "a rank is told where to meet others that may never come, and cannot be called off",
        "dpkit/nursery/joined.py",
        "            held = round_ is not None\n",
        "            held = False\n",
        f"{LOCKSTEP}::test_nobody_is_answered_before_all_have_said_hello",
    ),
    "wave_unheard": Plant(
        "P5",
        "requests are stamped with a wave that is over, so that other ranks take it for stale",
        "dpkit/nursery/joined.py",
        "            round_.stamp(connection)\n",
        "",
        f"{LOCKSTEP}::test_I02_the_first_request_at_any_rank_wakes_the_others_and_waves_are_told",
    ),
}


def planted_copy(name: str, directory: Path) -> None:
    """Copy what the tests need into `directory`, and apply the patch of that name.

    Compiled files too: they save half of a run's time.
    """
    for part in ("dpkit", NURSERY, SERVE, OBSERVE, BENCH, JOINED):
        shutil.copytree(ROOT / part, directory / part)
    shutil.copy(ROOT / "pyproject.toml", directory)
    for helper in (ROOT / "tests").glob("[!t]*.py"):
        shutil.copy(helper, directory / "tests")
    if name == "none":
        return
    plant = PLANTS[name]
    path = directory / plant.file
    text = path.read_text()
    if text.count(plant.old) != 1:
        raise SystemExit(f"plant {name}: {plant.file} does not hold the text to patch once")
    path.write_text(text.replace(plant.old, plant.new))


def tests_of(name: str) -> list[str]:
    """What must notice; of an unbroken copy, what must not."""
    return [PLANTS[name].test] if name != "none" else sorted({p.test for p in PLANTS.values()})


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tests that must notice in a planted copy; a few seeds find what is always there."""
    with tempfile.TemporaryDirectory(prefix="dpkit-planted-") as directory:
        planted_copy(name, Path(directory))
        words = ["-m", "pytest", "-p", "no:cacheprovider", "-q", *tests_of(name), *arguments]
        return subprocess.run(
            [sys.executable, *words],
            cwd=directory,
            env={"DPKIT_TEST_SEEDS": "4", **os.environ, "PYTHONPATH": directory},
            capture_output=True,
            text=True,
            check=False,
        )


if __name__ == "__main__":
    done = run(*sys.argv[1:])
    print(done.stdout, done.stderr, sep="\n")
    sys.exit(done.returncode)
