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


PLANTS = {
    "await_in_release": Plant(
        "dpkit/nursery/stream.py",
        "        self.close()\n",
        "        await trio.lowlevel.checkpoint()\n        self.close()\n",
        "a cancelled reader is cancelled again on its way out, and its engine stays charged",
    ),
    "checkpoint_after_charge": Plant(
        "dpkit/nursery/stream.py",
        "        self.placement = self._client.begin(self)\n",
        "        self.placement = self._client.begin(self)\n"
        "        await trio.lowlevel.checkpoint()\n",
        "a reader cancelled between charge and block never reaches the release",
    ),
    "unshielded_services": Plant(
        "dpkit/nursery/services.py",
        "            with trio.CancelScope(shield=True):\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        "            with trio.CancelScope():\n"
        "                async with trio.open_nursery() as self._nursery:\n",
        "a cancellation from outside ends the engines before the body has cleaned up",
    ),
    "abort_forgotten": Plant(
        "dpkit/nursery/client.py",
        "        self._links[placement.engine].abort(stream.request_id)\n",
        "",
        "the books are right, but the engine generates for nobody",
    ),
    "queue_keeps_aborted": Plant(
        "dpkit/engine/scheduler.py",
        " or self.waiting.pop(request_id, None)\n",
        "\n",
        "whoever leaves while waiting keeps the place",
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
}


def planted_copy(name: str, directory: Path) -> None:
    """Copy what the tests need into `directory`, and apply the patch of that name."""
    for part in ("dpkit", "tests/nursery"):
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
