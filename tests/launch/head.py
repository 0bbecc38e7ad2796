"""A program with workers, to be killed in some phase: ``head.py PHASE FOLDER``.

Says that it is in the phase by files in the folder; everything that it starts is below it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio

from dpkit.launch.folder import open_folder
from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote

PHASE, FOLDER = sys.argv[1], Path(sys.argv[2])
HERE = "launch_targets"


async def serve(opener: Any, work: str) -> None:
    """Have three workers that do it, each of which makes a file."""
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(opener(f"{HERE}:prepare", name="launcher"))
        for number in range(3):
            args = {"path": str(FOLDER / str(number))}
            await stack.enter_async_context(
                launcher.open_worker(f"{HERE}:{work}", args, name=f"worker-{number}", grace=0.1)
            )
        if PHASE == "forked":
            fork_and_hold_everything()
        await trio.sleep_forever()


async def prepare(opener: Any, prepare: str) -> None:
    """Be for ever in preparing, or in importing it."""
    args = {"path": str(FOLDER / "0")} if prepare.startswith(HERE) else {}
    async with (
        opener(prepare, args, name="launcher", env={"SLOW": str(FOLDER / "0")}) as launcher,
        launcher.open_worker(f"{HERE}:serve", name="worker"),
    ):
        pass


async def end(opener: Any, work: str) -> None:
    """Have had a worker, and not yet let go of the folder for sockets."""
    with open_folder() as folder:
        (Path(folder) / "socket").touch()
        args = {"path": str(FOLDER / "began")}
        async with (
            opener(f"{HERE}:prepare", name="launcher") as launcher,
            launcher.open_worker(f"{HERE}:{work}", args, name="worker", grace=0),
        ):
            pass
        (FOLDER / "new").write_text(folder)
        (FOLDER / "new").rename(FOLDER / "0")
        await trio.sleep_forever()


def fork_and_hold_everything() -> None:
    """A child of the program's own that keeps every descriptor open, and so every lifeline."""
    if os.fork() == 0:
        (FOLDER / "held").write_text(str(os.getpid()))
        time.sleep(1000)


PHASES: dict[str, tuple[Any, Any, str]] = {
    "importing": (prepare, open_zygote, "slow_import:prepare"),
    "preparing": (prepare, open_zygote, f"{HERE}:hang_with_child"),
    "spawning": (prepare, open_spawner, f"{HERE}:hang_with_child"),
    "serving": (serve, open_zygote, "serve_with_child"),
    "stubborn": (serve, open_zygote, "serve_stubbornly"),
    "spawned": (serve, open_spawner, "serve_with_child"),
    "forked": (serve, open_zygote, "serve"),
    "watching": (serve, open_zygote, "watch"),
    "ending": (end, open_zygote, "serve"),
}

if __name__ == "__main__":
    function, opener, target = PHASES[PHASE]
    trio.run(function, opener, target)
