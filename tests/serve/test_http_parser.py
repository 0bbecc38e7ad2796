"""From bytes to requests: however they are split, and nothing that two servers could read twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from attrs import astuple
from hypothesis import given
from hypothesis import strategies as st

from dpkit.serve.limits import HttpLimits, Room
from dpkit.serve.parser import Expectation, Message, Refusal, RequestParser
from dpkit.serve.target import BadTarget, split_target
from tests.serve.mauled import BAD, CORPUS, GET, GOOD, LIMITS, POST, maul

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.serve.parser import Event


def parse(pieces: Iterable[bytes], limits: HttpLimits = LIMITS) -> list[Event]:
    room = Room(limits.max_bodies)
    parser = RequestParser(limits, room, "peer", lambda: "id")
    events = [event for piece in pieces for event in parser.feed(piece)]
    bodies = sum(len(each.request.body) for each in events if isinstance(each, Message))
    parser.close()
    assert room.used == bodies, "what an incomplete request took is given back"
    return events


def flat(events: list[Event]) -> list[object]:
    """What can be compared: a refusal's words may depend on what came first."""
    return [
        (astuple(each.request), each.keep_alive)
        if isinstance(each, Message)
        else getattr(each, "status", 100)
        for each in events
    ]


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_a_request_is_the_same_however_it_is_split(data: bytes) -> None:
    (whole,) = parse([data])
    assert isinstance(whole, Message)
    assert whole.request.body == (b"hello" if b"POST" in data else b"")
    assert flat(parse(data[i : i + 1] for i in range(len(data)))) == flat([whole])
    for i in range(1, len(data)):
        assert flat(parse([data[:i], data[i:]])) == flat([whole]), f"split at {i}"


@pytest.mark.parametrize(("status", "data"), BAD.values(), ids=BAD)
def test_what_is_no_request_is_refused_however_it_is_split(status: int, data: bytes) -> None:
    assert flat(parse([data])) == [status]
    assert flat(parse(data[i : i + 1] for i in range(len(data)))) == [status]
    for i in range(1, len(data), 1 + len(data) // 200):
        assert flat(parse([data[:i], data[i:]])) == [status], f"split at {i}"


@pytest.mark.parametrize(("status", "data"), BAD.values(), ids=BAD)
def test_nothing_is_understood_after_a_refusal(status: int, data: bytes) -> None:
    assert flat(parse([data, GET + b"\r\n"])) == [status]
    assert len(parse([data + GET + b"\r\n"])) == 1


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_requests_follow_each_other(data: bytes) -> None:
    once = parse([data])
    if isinstance(once[0], Message) and once[0].keep_alive:
        assert flat(parse([data, data, data])) == flat(once) * 3
        assert flat(parse([data * 3])) == flat(once) * 3


REPEATED = [each for each in GOOD.values() if b"100-continue" not in each.lower()]


@given(
    st.lists(
        st.sampled_from([*REPEATED, *REPEATED, b"\r", b"\r\n", GET, GET[:9], GET[9:] + b"\r\n"])
    )
)
def test_who_says_the_same_again_is_understood_as_if_for_the_first_time(
    pieces: list[bytes],
) -> None:
    said = b"".join(pieces)
    one_by_one = parse(said[i : i + 1] for i in range(len(said)))  # where nothing is recognized
    assert flat(parse(pieces)) == flat(one_by_one)


def test_a_request_in_the_same_words_has_an_id_of_its_own() -> None:
    names, other = iter("abc"), POST + b"Content-Length: 1\r\n\r\nx"
    parser = RequestParser(LIMITS, Room(LIMITS.max_bodies), "peer", lambda: next(names))
    said = [parser.feed(each) for each in (GET + b"\r\n", other, GET + b"\r\n")]
    told = [event.request for events in said for event in events if isinstance(event, Message)]
    assert [(each.method, each.id) for each in told] == [("GET", "a"), ("POST", "b"), ("GET", "c")]


def test_a_client_that_waits_is_told_to_go_on() -> None:
    head = POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    waiting, message = parse([head, b"hello"])
    assert isinstance(waiting, Expectation)
    assert isinstance(message, Message)
    assert message.request.body == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
        POST + b"Expect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["it did not wait", "no body", "HTTP/1.0"],
)
def test_a_client_that_does_not_wait_is_told_nothing(data: bytes) -> None:
    assert [type(each) for each in parse([data])] == [Message]


def test_a_client_is_told_once_that_its_body_is_too_long() -> None:
    head = POST + b"Expect: 100-continue\r\nContent-Length: 5000\r\n\r\n"
    assert flat(parse([head, b"hello"])) == [413]


@pytest.mark.parametrize(
    ("version", "connection", "keeps"),
    [
        ("1.1", "", True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive, CLOSE", False),
        ("1.0", "", False),
        ("1.0", "keep-alive", True),
    ],
)
def test_who_keeps_the_connection_open(version: str, connection: str, keeps: bool) -> None:
    line = f"Connection: {connection}\r\n" if connection else ""
    (message,) = parse([f"GET / HTTP/{version}\r\nHost: a\r\n{line}\r\n".encode()])
    assert isinstance(message, Message)
    assert message.keep_alive is keeps


def test_header_names_are_lower_case_and_values_stripped() -> None:
    (message,) = parse([GET + b"X-One:  a b \t\r\nx-one: c\r\n\r\n"])
    assert isinstance(message, Message)
    assert message.request.headers == ((b"host", b"a"), (b"x-one", b"a b"), (b"x-one", b"c"))


def test_bodies_share_the_room_that_there_is() -> None:
    room = Room(8)
    first, second = (RequestParser(LIMITS, room, "peer", lambda: "id") for _ in range(2))
    head = POST + b"Content-Length: 6\r\n\r\n"
    assert not first.feed(head + b"12345")
    (refusal,) = second.feed(head + b"1234")
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503
    (message,) = first.feed(b"6")
    assert isinstance(message, Message)
    assert message.request.body == b"123456"
    assert room.used == 6


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", ""),
        (b"/a%20b/%C3%A9?q=%20&r", "/a b/é", "q=%20&r"),
        (b"/%zz%FF", "/%zz\ufffd", ""),
        (b"/a?b?c", "/a", "b?c"),
        (b"//a/../b", "//a/../b", ""),
        (b"HTTP://h:1/x?y", "/x", "y"),
        (b"https://h", "/", ""),
        (b"http://h?y", "/", "y"),
    ],
)
def test_targets(target: bytes, path: str, query: str) -> None:
    assert split_target("GET", target) == (path, query)


def test_options_may_ask_for_all() -> None:
    assert split_target("OPTIONS", b"*") == ("*", "")
    for bad in (b"*", b"a/b", b"ftp://h/x", b"", b"mailto:a@b"):
        with pytest.raises(BadTarget):
            split_target("GET", bad)


def test_mauled_requests_are_the_same_however_they_are_split() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        data = maul(rng.choice(CORPUS), rng)
        cut = rng.randrange(len(data) + 1)
        whole, split = gist(parse([data])), gist(parse([data[:cut], data[cut:]]))
        assert whole == split, data


def gist(events: list[Event]) -> list[object]:
    """Which of several faults is found first may depend on the split; that one is found may not."""
    found = [each for each in flat(events) if each != 100]
    assert all(each in STATUSES for each in found if isinstance(each, int))
    return ["refused" if isinstance(each, int) else each for each in found]


STATUSES = {400, 413, 417, 431, 501, 503, 505}


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_whatever_are_parsed_or_refused(pieces: list[bytes]) -> None:
    parse(pieces)
