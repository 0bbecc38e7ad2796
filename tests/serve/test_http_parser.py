"""From bytes to requests: however they are split, and nothing that two servers could read twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkit.serve.limits import HttpLimits, Room
from dpkit.serve.parser import Expectation, Message, Refusal, RequestParser
from dpkit.serve.target import BadTarget, split_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.serve.parser import Event

LIMITS = HttpLimits(max_head=1024, max_body=2048)
POST = b"POST /v1/x?y=1 HTTP/1.1\r\nHost: a\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED = POST + CHUNKS
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"

GOOD = {
    "no body": GET + b"\r\n",
    "length": POST + b"Content-Length: 5\r\n\r\nhello",
    "chunks": CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n",
    "trailers": CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n",
    "empty lines before": b"\r\n\r\n" + GET + b"\r\n",
    "HTTP/1.0": b"GET / HTTP/1.0\r\n\r\n",
    "proxy's form": b"GET http://a:80/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "another protocol": POST + UPGRADE + b"Content-Length: 5\r\n\r\nhello",
    "another, in chunks": POST + UPGRADE + CHUNKS + b"5\r\nhello\r\n0\r\n\r\n",
    "another, no body": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "odd letters": GET + b"X: caf\xc3\xa9\xff\r\n\r\n",
    "empty header": GET + b"X:\r\nY:   \r\n\r\n",
}
BAD = {
    "two lengths": (400, POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    "the same length twice": (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    "a list of lengths": (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
    "a signed length": (400, POST + b"Content-Length: +3\r\n\r\nabc"),
    "a negative length": (400, POST + b"Content-Length: -3\r\n\r\nabc"),
    "a hexadecimal length": (400, POST + b"Content-Length: 0x3\r\n\r\nabc"),
    "an empty length": (400, POST + b"Content-Length:\r\n\r\nabc"),
    "an overflowing length": (400, POST + b"Content-Length: 18446744073709551617\r\n\r\nabc"),
    "length, then chunked": (
        400,
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "chunked, then length": (
        400,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ),
    "chunked, not last": (400, POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
    "chunked twice": (400, POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n"),
    "chunked, with a tab": (400, POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n"),
    "chunked, space before colon": (400, POST + b"Transfer-Encoding : chunked\r\n\r\n"),
    "almost chunked": (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "compressed": (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "identity": (501, POST + b"Transfer-Encoding: identity\r\n\r\n"),
    "chunks in HTTP/1.0": (
        400,
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "chunk size with 0x": (400, CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n"),
    "negative chunk size": (400, CHUNKED + b"-1\r\nabc\r\n"),
    "space before chunk size": (400, CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n"),
    "space after chunk size": (400, CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n"),
    "no chunk size": (400, CHUNKED + b"\r\nabc\r\n"),
    "overflowing chunk size": (400, CHUNKED + b"fffffffffffffffff\r\nabc\r\n"),
    "chunk too short": (400, CHUNKED + b"4\r\nabc\r\n0\r\n\r\n"),
    "chunk too long": (400, CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n"),
    "bare LF after chunk size": (400, CHUNKED + b"3\nabc\r\n0\r\n\r\n"),
    "bare LF after chunk": (400, CHUNKED + b"3\r\nabc\n0\r\n\r\n"),
    "bare LF in chunk extension": (400, CHUNKED + b"3;\n\r\nabc\r\n0\r\n\r\n"),
    "length in trailers": (400, CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n"),
    "bare LF after request line": (400, b"GET / HTTP/1.1\nHost: a\r\n\r\n"),
    "bare LF after header": (400, b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n"),
    "bare LF at the end": (400, GET + b"\n"),
    "bare CR in header": (400, b"GET / HTTP/1.1\r\nHost: a\rX: y\r\n\r\n"),
    "NUL in header": (400, GET + b"X: a\0b\r\n\r\n"),
    "NUL in header name": (400, GET + b"X\0: a\r\n\r\n"),
    "NUL in target": (400, b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "folded header": (400, GET + b"X: a\r\n b\r\n\r\n"),
    "space before the first header": (400, b"GET / HTTP/1.1\r\n Host: a\r\n\r\n"),
    "no header name": (400, GET + b": a\r\n\r\n"),
    "no colon": (400, GET + b"X\r\n\r\n"),
    "no host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two hosts": (400, GET + b"Host: a\r\n\r\n"),
    "not ASCII in target": (400, b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "fragment": (400, b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n"),
    "no path": (400, b"GET * HTTP/1.1\r\nHost: a\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "HTTP/0.9": (505, b"GET /\r\n\r\n"),
    "HTTP/2": (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
    "HTTP/1.2": (400, b"GET / HTTP/1.2\r\nHost: a\r\n\r\n"),
    "unknown method": (501, b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n"),
    "proxy method": (501, b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "unknown expectation": (417, POST + b"Expect: tea\r\nContent-Length: 1\r\n\r\nx"),
    "long line": (431, b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "long header": (431, GET + b"X: " + b"a" * 2000 + b"\r\n\r\n"),
    "long header name": (431, GET + b"x" * 2000 + b": a\r\n\r\n"),
    "many headers": (431, GET + b"X: y\r\n" * 300 + b"\r\n"),
    "many trailers": (431, CHUNKED + b"0\r\n" + b"X: y\r\n" * 300 + b"\r\n"),
    "long body": (413, POST + b"Content-Length: 2049\r\n\r\n"),
    "many chunks": (413, CHUNKED + (b"400\r\n" + b"a" * 1024 + b"\r\n") * 2 + b"1\r\na\r\n"),
    "much framing": (413, CHUNKED + b"1;" + b"x" * 4000 + b"\r\n"),
}


def parse(pieces: Iterable[bytes], limits: HttpLimits = LIMITS) -> list[Event]:
    room = Room(limits.max_bodies)
    parser = RequestParser(limits, room)
    events = [event for piece in pieces for event in parser.feed(piece)]
    bodies = sum(len(event.body) for event in events if isinstance(event, Message))
    parser.close()
    assert room.used == bodies, "what an incomplete request took is given back"
    return events


def flat(events: list[Event]) -> list[object]:
    """What can be compared: a refusal's words may depend on what came first."""
    return [
        (each.method, each.path, each.query, each.headers, each.version, each.keep_alive, each.body)
        if isinstance(each, Message)
        else getattr(each, "status", 100)
        for each in events
    ]


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_a_request_is_the_same_however_it_is_split(data: bytes) -> None:
    (whole,) = parse([data])
    assert isinstance(whole, Message)
    assert whole.body == (b"hello" if b"POST" in data else b"")
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


def test_a_client_that_waits_is_told_to_go_on() -> None:
    head = POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    waiting, message = parse([head, b"hello"])
    assert isinstance(waiting, Expectation)
    assert isinstance(message, Message)
    assert message.body == b"hello"


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
    assert message.headers == ((b"host", b"a"), (b"x-one", b"a b"), (b"x-one", b"c"))


def test_bodies_share_the_room_that_there_is() -> None:
    room = Room(8)
    first, second = (RequestParser(LIMITS, room) for _ in range(2))
    head = POST + b"Content-Length: 6\r\n\r\n"
    assert not first.feed(head + b"12345")
    (refusal,) = second.feed(head + b"1234")
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503
    assert flat(list(first.feed(b"6")))[0][-1] == b"123456"  # type: ignore[index]
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


def maul(data: bytes, rng: random.Random) -> bytes:
    """Damage a request, as an attacker or a bad line would."""
    mauled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(mauled) + 1)
        match rng.randrange(6):
            case 0:
                mauled[place:place] = rng.choice(SHARDS)
            case 1:
                del mauled[place : place + rng.randint(1, 8)]
            case 2:
                mauled[place : place + 1] = rng.randbytes(1)
            case 3:
                mauled[place:place] = mauled[: rng.randrange(40)]
            case 4:
                mauled[place:place] = rng.choice(SHARDS) * rng.randint(1, 99)
            case _:
                mauled = mauled.replace(b"\r\n", rng.choice([b"\n", b"\r", b"\r\r\n"]), 1)
    return bytes(mauled)


SHARDS = [
    b"\0", b"\n", b"\r", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b";", b"%", b"\xff", b"\x0b",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: b\r\n", b"0\r\n\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"GET / HTTP/1.1\r\n", b"HTTP/9.9", b"ffffffff\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n",
]  # fmt: skip
CORPUS = [*GOOD.values(), *(data for _, data in BAD.values())]


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
