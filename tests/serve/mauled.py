"""Requests as they should be, as they must not be, and damaged ones of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.serve.limits import HttpLimits

if TYPE_CHECKING:
    import random

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
