"""Prompts from a file descriptor, a line each, without a thread and without blocking Trio.

A thread that reads standard input cannot be cancelled, and making the descriptor non-blocking would
change it for the shell that shares it. So: wait until it is readable, then read once. No more is
read while `take` waits, so an endless input costs no memory.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_CHUNK = 65_536  # bytes; the size of a Linux pipe
_LONGEST = 16 * 2**20  # bytes of one line: far beyond what any model reads, and no danger to us


@frozen
class Prompt:
    """One prompt, or a line that should be one and has a problem."""

    text: str
    problem: str | None = None


async def read_prompts(take: Callable[[Prompt], Awaitable[None]]) -> None:
    """Call `take` with each line of standard input that is not blank, until it ends.

    Raises:
        DpkitError: standard input is closed or cannot be read.
    """
    if sys.stdin is None:
        raise DpkitError("reading prompts: standard input is closed; give --prompt instead")
    fd, lines = sys.stdin.fileno(), _Lines()
    try:
        while chunk := await _read(fd):
            for prompt in lines.feed(chunk):
                await take(prompt)
    except OSError as error:
        raise DpkitError(f"reading prompts from standard input: {error.strerror}") from error
    for prompt in lines.feed(b"\n"):
        await take(prompt)


class _Lines:
    """Cuts chunks into lines; each byte is copied twice, however long a line is."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._number = 0
        self._too_long = False

    def feed(self, chunk: bytes) -> Iterator[Prompt]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._add(chunk[start:end])
            self._number += 1
            if (prompt := self._prompt()) is not None:
                yield prompt
            self._begun.clear()
            self._too_long = False
            start = end + 1
        self._add(chunk[start:])

    def _add(self, part: bytes) -> None:
        if len(self._begun) + len(part) > _LONGEST:
            self._too_long = True
        elif not self._too_long:
            self._begun += part

    def _prompt(self) -> Prompt | None:
        text = self._begun.decode(errors="replace").strip()
        where = f"reading prompts: line {self._number} of standard input"
        if self._too_long:
            return Prompt(text[:100], f"{where} is longer than {_LONGEST:,} bytes")
        try:
            self._begun.decode()
        except UnicodeDecodeError as error:
            return Prompt(text, f"{where} is not UTF-8: {error.reason} at byte {error.start}")
        return Prompt(text) if text else None


async def _read(fd: int) -> bytes:
    try:
        await trio.lowlevel.wait_readable(fd)
    except PermissionError:  # a regular file or /dev/null: never blocks, and epoll refuses it
        await trio.lowlevel.checkpoint()
    return os.read(fd, _CHUNK)
