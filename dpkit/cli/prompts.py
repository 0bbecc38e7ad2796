"""Prompts from a file descriptor, a line each, without a thread and without blocking Trio.

A thread that reads standard input cannot be cancelled, and making the descriptor non-blocking would
change it for the shell that shares it. So: wait until it is readable, then read once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 65_536  # bytes; the size of a Linux pipe


async def read_prompts(fd: int, submit: Callable[[str], None]) -> None:
    """Call `submit` with each line that is not blank, as soon as it is complete, until EOF.

    Raises:
        DpkitError: a line is not UTF-8; the message says which.
    """
    rest, number = b"", 0
    while chunk := await _read(fd):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            _submit(line, number, submit)
    _submit(rest, number + 1, submit)


def _submit(line: bytes, number: int, submit: Callable[[str], None]) -> None:
    try:
        prompt = line.decode().strip()
    except UnicodeDecodeError as error:
        raise DpkitError(f"reading prompts: line {number} of stdin is not UTF-8: {error}") from None
    if prompt:
        submit(prompt)


async def _read(fd: int) -> bytes:
    try:
        await trio.lowlevel.wait_readable(fd)
    except PermissionError:  # a regular file or /dev/null: never blocks, and epoll refuses it
        await trio.lowlevel.checkpoint()
    return os.read(fd, _CHUNK)
