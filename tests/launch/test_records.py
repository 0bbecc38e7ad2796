"""Log records of a process arrive as records, whatever becomes of the process."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from dpkit.launch.output import LONGEST, Output
from dpkit.launch.records import MARK, RecordFormatter, read_record
from dpkit.logs import about

if TYPE_CHECKING:
    import pytest


def written(message: str, error: Exception | None = None, level: int = logging.ERROR) -> bytes:
    told = logging.getLogger("dpkit.link").makeRecord(
        "dpkit.link", level, "", 0, message, (), None, extra=about(request_id="r-1")
    )
    if error is not None:
        told.exc_info = (type(error), error, error.__traceback__)
    return RecordFormatter().format(told).encode() + b"\n"


def relay(data: bytes) -> Output:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = Output(reading, "e-0")
    try:
        for start in range(0, len(data), 32_000):
            os.write(writing, data[start : start + 32_000])
            output.drain()
        os.close(writing)
        assert not output.drain()
    finally:
        output.close()
    return output


def test_a_record_keeps_its_level_its_request_and_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = relay(written("one\ntwo", ValueError("three")))
    [told] = caplog.records
    assert (told.name, told.levelname) == ("dpkit.worker.e-0", "ERROR")
    assert told.getMessage() == "dpkit.link: one\ntwo"
    assert (vars(told)["request_id"], vars(told)["engine"]) == ("r-1", "e-0")
    assert told.exc_text == "ValueError: three"
    assert [*output.lines] == ["ERROR dpkit.link: one", "two", "ValueError: three"]


def test_what_nobody_wants_to_hear_is_only_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dpkit")
    output = relay(written("hello", level=logging.DEBUG))
    assert not caplog.records
    assert [*output.lines] == ["DEBUG dpkit.link: hello"]


def test_text_around_records_stays_text_and_is_about_the_engine_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    relay(b"before\n" + written("amid") + b"after\n")
    assert [told.getMessage() for told in caplog.records] == ["before", "dpkit.link: amid", "after"]
    assert {vars(told)["engine"] for told in caplog.records} == {"e-0"}


def test_the_longest_record_is_one(caplog: pytest.LogCaptureFixture) -> None:
    deep = ValueError("\x01" * 100_000)
    relay(written("\x01" * 100_000, deep))
    [told] = caplog.records
    assert told.exc_text is not None
    assert len(told.getMessage()) + len(told.exc_text) > LONGEST


def test_half_a_record_is_shown_as_it_came(caplog: pytest.LogCaptureFixture) -> None:
    half = written("unfinished")[:-10]
    relay(half)
    [told] = caplog.records
    assert told.getMessage() == half.decode()


def test_what_is_no_record_is_none() -> None:
    assert read_record(b"text") is None
    assert read_record(MARK + b"{") is None
    assert read_record(MARK + b'{"level": "x"}') is None
    assert read_record(MARK + b"\xff") is None
