"""A program that forgot to ask whether it is the program: whoever imports it, runs it."""

from __future__ import annotations

import os

import trio

from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote

print("runs", flush=True)


def prepare() -> None:
    pass


async def main() -> None:
    opener = open_spawner if "SPAWN" in os.environ else open_zygote
    async with opener(f"{__name__}:prepare", name="again"):
        pass


if os.environ.get("UNGUARDED"):
    trio.run(main)
