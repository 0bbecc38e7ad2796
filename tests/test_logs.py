"""Log records say what they are about, in text and as JSON."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.logs import ENGINE, REQUEST_ID, JsonFormatter, TextFormatter, about, name_subject

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nobodys() -> Iterator[None]:
    """A task that is about nothing: commands that ran in this process before may have said more."""
    tokens = REQUEST_ID.set(None), ENGINE.set(None)
    yield
    REQUEST_ID.reset(tokens[0])
    ENGINE.reset(tokens[1])


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("dpkit.x").makeRecord(
        "dpkit.x", logging.WARNING, "", 0, message, args, None, extra=extra.pop("of", None)
    )


def as_json(told: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(told)
    assert "\n" not in line
    fields: dict[str, Any] = json.loads(line)
    return fields


def test_json_has_all_that_is_known_in_one_line() -> None:
    told = record("%s\nand %s", "one", "two", of=about(request_id="r", engine="e-0", status=200))
    told.created = 0.25
    assert as_json(told) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "dpkit.x",
        "message": "one\nand two",
        "request_id": "r",
        "engine": "e-0",
        "status": 200,
    }


def test_a_traceback_is_part_of_its_object_and_follows_the_line_of_text() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        told = record("broke")
        told.exc_info = (type(error), error, error.__traceback__)
    assert as_json(told)["traceback"].endswith("ZeroDivisionError: division by zero")
    first, *rest = TextFormatter().format(told).splitlines()
    assert first.endswith("WARNING dpkit.x: broke")
    assert rest[-1] == "ZeroDivisionError: division by zero"


def test_text_names_what_the_message_does_not() -> None:
    told = record("request r ended", of=about(request_id="r", engine="e-0"))
    assert TextFormatter().format(told).endswith(": request r ended [e-0]")
    assert TextFormatter().format(record("idle")).endswith(": idle")


def test_a_record_is_about_what_its_task_is_about_if_nobody_says_otherwise() -> None:
    tokens = REQUEST_ID.set("r"), ENGINE.set("e-1")
    try:
        told = record("a model's own")
        assert name_subject(told)
        assert (vars(told)["request_id"], vars(told)["engine"]) == ("r", "e-1")
        other = record("of another", of=about(engine="e-2"))
        assert as_json(other)["engine"] == "e-2"
    finally:
        REQUEST_ID.reset(tokens[0])
        ENGINE.reset(tokens[1])


def test_what_json_does_not_know_is_told_as_text() -> None:
    assert as_json(record("x", of=about(what={1, 2}.__class__)))["what"] == "<class 'set'>"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_record_of_another_library_is_written_as_well(formatter: logging.Formatter) -> None:
    told = logging.getLogger("other").makeRecord("other", 30, "", 0, "hello %d", (3,), None)
    assert "hello 3" in formatter.format(told)
