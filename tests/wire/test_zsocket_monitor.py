"""What libzmq's monitor tells, read: a peer is one that has greeted, whoever else knocks."""

from __future__ import annotations

import struct

import zmq

from dpkit.wire.monitor import PeerReader


def told(*events: tuple[zmq.Event, int]) -> list[str]:
    log: list[str] = []
    reader = PeerReader()
    for event, connection in events:
        frames = [struct.pack("=Hi", event, connection), b"tcp://here:1"]
        reader.read(frames, lambda _: log.append("come"), lambda _: log.append("go"))
    return log


KNOCK, GREET, END = zmq.Event.ACCEPTED, zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED


def test_a_peer_comes_when_it_has_greeted_and_goes() -> None:
    assert told((KNOCK, 7)) == []
    assert told((KNOCK, 7), (GREET, 0)) == ["come"]
    assert told((KNOCK, 7), (GREET, 0), (END, 7)) == ["come", "go"]


def test_a_number_may_be_another_peers_afterwards() -> None:
    once = [(KNOCK, 7), (GREET, 0), (END, 7)]
    assert told(*once, *once) == ["come", "go"] * 2


def test_a_stranger_neither_comes_nor_goes() -> None:
    assert told((KNOCK, 7), (END, 7)) == []
    assert told((KNOCK, 7), (GREET, 0), (KNOCK, 8), (END, 8), (END, 7)) == ["come", "go"]


def test_many_may_knock_before_the_first_greets() -> None:
    both = [(KNOCK, 7), (KNOCK, 8), (GREET, 0), (GREET, 0)]
    assert told(*both, (END, 8)) == ["come", "come", "go"]
    assert told(*both, (END, 8), (END, 7)) == ["come", "come", "go", "go"]


def test_a_greeting_beside_a_silent_stranger_is_the_peers_in_the_end() -> None:
    beside = [(KNOCK, 7), (KNOCK, 8), (GREET, 0)]
    assert told(*beside, (END, 8), (END, 7)) == ["come", "go"]
    assert told(*beside, (END, 7), (END, 8)) == ["come", "go"]


def test_a_greeting_may_be_told_before_its_knock() -> None:
    assert told((GREET, 0), (KNOCK, 7), (END, 7)) == ["come", "go"]
