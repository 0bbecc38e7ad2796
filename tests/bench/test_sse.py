"""Events of a stream: whole wherever it is cut, and which of them are tokens."""

from __future__ import annotations

import pytest

from dpkit.bench.sse import BadEvent, EventReader

STREAM = (
    b': a comment\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n'
    b'data:{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("cut", range(0, len(STREAM), 3))
def test_events_are_whole_wherever_the_stream_is_cut(cut: int) -> None:
    reader = EventReader()
    events = [*reader.feed(STREAM[:cut]), *reader.feed(STREAM[cut:])]
    assert reader.is_done
    assert [choice.has_token for event in events for choice in event.choices] == [0, 1, 1]
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("choice", "has_token"),
    [
        ('{"text": "a", "finish_reason": null}', True),
        ('{"text": "", "finish_reason": null}', True),  # half a character
        ('{"text": "", "finish_reason": "stop"}', False),
        ('{"text": "a", "finish_reason": "stop"}', True),
        ('{"delta": {}, "finish_reason": "length"}', False),
        ('{"delta": {"reasoning_content": "hm"}}', True),
        ('{"delta": {"reasoning": "hm"}}', True),
        ('{"delta": {"tool_calls": [{"index": 0}]}}', True),
        ('{"delta": {"content": null}}', False),
    ],
)
def test_what_is_a_token(choice: str, has_token: bool) -> None:
    [event] = EventReader().feed(b'data: {"choices": [%b]}\n' % choice.encode())
    assert event.choices[0].has_token is has_token


def test_an_event_that_makes_no_sense_is_told_of() -> None:
    with pytest.raises(BadEvent, match=r"an event cannot be read: .*: b'nonsense'"):
        list(EventReader().feed(b"data: nonsense\n"))


def test_an_event_without_end_is_given_up() -> None:
    reader = EventReader()
    with pytest.raises(BadEvent, match="an event is longer than 16,777,216 bytes"):
        list(reader.feed(b"data: " + b"x" * 2**24))
