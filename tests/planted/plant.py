"""Break a promise on purpose, in a copy of the tree, and run the test that must notice.

Usage: ``python tests/planted/plant.py NAME [PYTEST ARGUMENT]...``; exits with pytest's status, so 1
is good news. NAME is a key of `PLANTS`, or ``none``: the copy unchanged, which must pass.
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
SWEEP = "tests/nursery/test_cancel_sweep.py"


class Plant(NamedTuple):
    """A patch: `old` stands exactly once in `file`."""

    file: str
    old: str
    new: str
    why: str
    test: str = SWEEP


ENDS = "tests/nursery/test_request_ends.py"

PLANTS = {
    "await_in_release": Plant(
        "dpkit/nursery/stream.py",
        "    ) -> None:\n        self.close()\n",
        "    ) -> None:\n        await trio.lowlevel.checkpoint()\n        self.close()\n",
        "a cancelled reader is cancelled again on its way out, and its engine stays charged",
    ),
    "checkpoint_after_charge": Plant(
        "dpkit/nursery/stream.py",
        "        self._flights.begin(self)\n",
        "        self._flights.begin(self)\n        await trio.lowlevel.checkpoint()\n",
        "a reader cancelled between charge and block never reaches the release",
    ),
    "unshielded_services": Plant(
        "dpkit/nursery/services.py",
        "            with trio.CancelScope(shield=True):\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        "            with trio.CancelScope():\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        "a cancellation from outside ends the engines before the body has cleaned up",
        "tests/nursery/test_services.py",
    ),
    "abort_forgotten": Plant(
        "dpkit/nursery/flights.py",
        "            link.abort(flight.request.request_id)\n",
        "            pass\n",
        "the books are right, but the engine generates for nobody",
    ),
    "abort_lost_while_waiting": Plant(
        "dpkit/engine/scheduler.py",
        "            if (request := self.waiting.pop(request_id, None)) is None:\n"
        "                return\n",
        "            return\n",
        "whoever leaves while waiting, or preempted, keeps the place",
        "tests/nursery/test_bug_reports.py",
    ),
    "interruptible_release": Plant(
        "dpkit/nursery/stream.py",
        "    @trio.lowlevel.enable_ki_protection  # nor between",
        "    # nor between",
        "Ctrl-C on the way out skips the release",
        "tests/nursery/test_interrupts.py",
    ),
    "old_step_reaches_new_request": Plant(
        "dpkit/nursery/busyloop.py",
        "            if self.inbox.is_aborted(output.request_id):\n",
        "            if False:\n",
        "a step under way answers whoever asks anew by an id that was left",
        "tests/nursery/test_bug_reports.py",
    ),
    "skipped_epoch_check": Plant(
        "dpkit/nursery/flights.py",
        " or flight.placement.engine != engine:\n",
        ":\n",
        "an output of another life reaches a request",
        "tests/nursery/test_client.py",
    ),
    "double_release": Plant(
        "dpkit/balancer/ledger.py",
        "        if self._charges.get(charge.request_id) is not charge:\n"
        "            return False\n        del self._charges[charge.request_id]\n",
        "        self._charges.pop(charge.request_id, None)\n",
        "a late release takes what another request was charged",
        "tests/balancer/test_ledger.py",
    ),
    "retry_keeps_the_old_charge": Plant(
        "dpkit/nursery/flights.py",
        "        self._leave_engine(flight)\n        flight.retries_left -= 1\n",
        "        flight.placement = None\n        flight.retries_left -= 1\n",
        "a request that goes on elsewhere is counted on the dead engine for ever",
        ENDS,
    ),
    "end_told_twice": Plant(
        "dpkit/nursery/flights.py",
        "        self.causes[cause] += 1\n",
        "        self.causes[cause] += 2\n",
        "statistics and events disagree on how requests ended",
        ENDS,
    ),
    "end_without_an_event": Plant(
        "dpkit/nursery/flights.py",
        "            EventKind.REQUEST_ENDED,\n",
        "            EventKind.REQUEST_RETRIED,\n",
        "a request ends in silence",
        ENDS,
    ),
    "older_stats_win": Plant(
        "dpkit/nursery/fanin.py",
        " and _age(stats) <= _age(newest):\n",
        " and _age(stats) == _age(newest):\n",
        "an engine's past is taken for its present",
        "tests/nursery/test_fanin.py",
    ),
    "retried_before_the_engine_is_gone": Plant(
        "dpkit/nursery/busyloop.py",
        "        self._on_lost(cause)\n",
        "",
        "requests of a dead engine are placed on the dead engine",
        ENDS,
    ),
}


def planted_copy(name: str, directory: Path) -> None:
    """Copy what the tests need into `directory`, and apply the patch of that name."""
    for part in ("dpkit", "tests/nursery", "tests/balancer"):
        shutil.copytree(ROOT / part, directory / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / part, directory / part)
    if name == "none":
        return
    plant = PLANTS[name]
    path = directory / plant.file
    text = path.read_text()
    if text.count(plant.old) != 1:
        raise SystemExit(f"plant {name}: {plant.file} does not hold the text to patch once")
    path.write_text(text.replace(plant.old, plant.new))


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the test that must notice in a planted copy; a few seeds find what is always there."""
    test = SWEEP if name == "none" else PLANTS[name].test
    with tempfile.TemporaryDirectory(prefix="dpkit-planted-") as directory:
        planted_copy(name, Path(directory))
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", test, *arguments],
            cwd=directory,
            env={"DPKIT_TEST_SEEDS": "2", **os.environ, "PYTHONPATH": directory},
            capture_output=True,
            text=True,
            check=False,
        )


if __name__ == "__main__":
    done = run(*sys.argv[1:])
    print(done.stdout, done.stderr, sep="\n")
    sys.exit(done.returncode)
