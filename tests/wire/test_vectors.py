"""Every golden vector is read, and written where dpkit writes such, in its own direction."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from dpkit.errors import RequestRejected
from dpkit.wire import codec
from dpkit.wire.codec import Abort, Add, EngineDead, ScaleElastic, Subscription, Utility
from dpkit.wire.convert import from_wire
from dpkit.wire.structs import (
    VLLM_VERSION,
    CoordinatorPublish,
    Envelope,
    SamplingMap,
    StartWave,
    UtilityCall,
    WireRequest,
)
from tests.wire.vectors import VECTORS, VERSION, Vector, named

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = named("request_", "rust_request_")
CALLS = named("utility_call", "rust_utility_")
ENVELOPES = named("outputs_", "coord_")
HELLOS = named("handshake_hello", "handshake_ready")
INITS = named("handshake_init", "rust_init")
STARTS = [*named("start_dp_wave"), "rust_inproc_start_dp_wave"]
PUBLISHES = ["coordinator_publish", "coordinator_wave_change"]
ZMTP = named("zmtp_")
CONSTANTS = {
    "frame_add": codec.ADD,
    "frame_abort": codec.ABORT,
    "frame_start_dp_wave": codec.START_WAVE,
    "frame_utility": codec.UTILITY,
    "frame_coordinator_ready": codec.COORDINATOR_READY,
    "frame_engine_dead": codec.ENGINE_DEAD,
    "frame_subscribe": codec.SUBSCRIBE,
    "identity_rank_0": codec.rank_identity(0),
    "identity_rank_1": codec.rank_identity(1),
    "identity_rank_258": codec.rank_identity(258),
}


def test_every_vector_has_a_test() -> None:
    tested = Counter(
        [
            *REQUESTS,
            *CALLS,
            *ENVELOPES,
            *HELLOS,
            *INITS,
            *STARTS,
            *PUBLISHES,
            *ZMTP,
            *CONSTANTS,
            "abort_two",
            "rust_abort",
            "engine_ready_response",
            "scale_marker",
        ]
    )
    assert tested == Counter(list(VECTORS))
    assert tested.total() == 76
    assert VLLM_VERSION == VERSION


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    assert VECTORS[name].frames == (CONSTANTS[name],)


def test_a_rank_is_read_from_its_identity() -> None:
    for rank in (0, 1, 258, 65535):
        assert codec.rank_of(codec.rank_identity(rank)) == rank


def in_json_form(value: Any) -> Any:
    """A payload as the vectors have it."""
    match value:
        case msgspec.msgpack.Ext():
            return {"__ext__": value.code, "hex": bytes(value.data).hex()}
        case dict():
            return {str(key): in_json_form(part) for key, part in value.items()}
        case list():
            return list(map(in_json_form, value))
    return value


def payload_of(frames: list[bytes]) -> Any:
    return in_json_form(msgspec.msgpack.decode(frames[0]))


def decoded_request(vector: Vector) -> WireRequest:
    message = codec.decode_input([codec.ADD, *vector.frames])
    assert isinstance(message, Add)
    return message.request


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_read_in_full(name: str) -> None:
    """Written again they are the same, but for sampling keys that no engine acts on."""
    vector = VECTORS[name]
    _, *frames = codec.encode_input(Add(decoded_request(vector)))
    written, expected = payload_of(frames), list(vector.decoded)
    ours, theirs = written.pop(3), expected.pop(3)
    assert (written, frames[1:]) == (expected, list(vector.frames[1:]))
    assert len(written) == 21
    if theirs is None:
        assert ours is None
        return
    assert ours.keys() <= theirs.keys()
    known = {field.encode_name: field.default for field in msgspec.structs.fields(SamplingMap)}
    for key in theirs.keys() & known.keys():
        assert theirs[key] == ours.get(key, known[key]), key


SERVED = {
    "request_minimal",
    *(name for name in named("rust_request_") if name != "rust_request_5"),
}
REFUSED = {
    "request_rich": "lora_request",
    "request_structured": "structured_outputs",
    "request_pooling": "pooling_params",
    "request_embeds_inline": "prompt_embeds",
    "request_embeds_aux": "prompt_embeds",
    "rust_request_5": "structured_outputs",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_served_or_refused_with_the_reason(name: str) -> None:
    request = decoded_request(VECTORS[name])
    if name in SERVED:
        assert list(from_wire(request).prompt_token_ids) == VECTORS[name].decoded[1]
        return
    with pytest.raises(RequestRejected, match=REFUSED[name]) as caught:
        from_wire(request)
    assert caught.value.request_id == VECTORS[name].decoded[0]


@pytest.mark.parametrize("name", ["abort_two", "rust_abort"])
def test_aborts(name: str) -> None:
    vector = VECTORS[name]
    message = codec.decode_input([codec.ABORT, *vector.frames])
    assert message == Abort(tuple(vector.decoded))
    assert codec.encode_input(message) == [codec.ABORT, *vector.frames]


@pytest.mark.parametrize("name", CALLS)
def test_utility_calls(name: str) -> None:
    vector = VECTORS[name]
    message = codec.decode_input([codec.UTILITY, *vector.frames])
    client_index, call_id, method, args = vector.decoded
    assert message == Utility(UtilityCall(client_index, call_id, method, tuple(args)))
    _, *frames = codec.encode_input(message)
    assert payload_of(frames) == vector.decoded  # a float may be half as long in another's writing


@pytest.mark.parametrize("name", ENVELOPES)
def test_envelopes_are_read_and_written_to_the_byte(name: str) -> None:
    vector = VECTORS[name]
    envelope = codec.decode_output(vector.frames)
    assert isinstance(envelope, Envelope)
    assert codec.encode_envelope(envelope) == list(vector.frames)


def test_the_death_sentinel() -> None:
    assert codec.decode_output(VECTORS["frame_engine_dead"].frames) == EngineDead()


@pytest.mark.parametrize("name", HELLOS)
def test_hello_and_ready(name: str) -> None:
    (frame,), said = VECTORS[name].frames, VECTORS[name].decoded
    hello = codec.decode_hello(frame)
    assert (hello.status, hello.local, hello.headless) == (
        said["status"],
        said["local"],
        said["headless"],
    )
    digest = said.get("parallel_config_hash")
    assert codec.encode_hello(hello.status, hello.local, hello.headless, digest) == frame


@pytest.mark.parametrize("name", INITS)
def test_inits(name: str) -> None:
    vector = VECTORS[name]
    init = codec.decode_init(vector.frames[0])
    assert msgspec.to_builtins(init) == {
        **vector.decoded,
        "addresses": {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in vector.decoded["addresses"].items()
        },
    }
    assert payload_of([codec.encode_init(init)]) == vector.decoded


def test_the_ready_response() -> None:
    (frame,) = VECTORS["engine_ready_response"].frames
    response = codec.decode_ready_response(frame)
    assert response is not None
    assert codec.encode_ready_response(response) == frame


@pytest.mark.parametrize("name", STARTS)
def test_starts_of_waves(name: str) -> None:
    vector = VECTORS[name]
    message = codec.decode_from_coordinator([codec.START_WAVE, *vector.frames])
    assert message == StartWave(*vector.decoded)
    assert codec.encode_start_wave(message) == [codec.START_WAVE, *vector.frames]


@pytest.mark.parametrize("name", PUBLISHES)
def test_publishes(name: str) -> None:
    (frame,), (loads, wave, running) = VECTORS[name].frames, VECTORS[name].decoded
    publish = codec.decode_publish(frame)
    told = None if loads is None else tuple(map(tuple, loads))
    assert publish == CoordinatorPublish(told, wave, running)
    assert codec.encode_publish(publish) == frame


def test_what_subscribers_say() -> None:
    (marker,), (_, engines) = VECTORS["scale_marker"].frames, VECTORS["scale_marker"].decoded
    assert codec.decode_to_coordinator(marker) == ScaleElastic(engines)
    assert codec.encode_scale(ScaleElastic(engines)) == marker
    (subscribe,) = VECTORS["frame_subscribe"].frames
    assert codec.decode_to_coordinator(subscribe) == Subscription(subscribed=True)
    assert codec.decode_to_coordinator(codec.UNSUBSCRIBE) == Subscription(subscribed=False)


@contextmanager
def open_reader(kind: int) -> Iterator[tuple[zmq.Socket[bytes], socket.socket]]:
    """A ZMQ socket, and a plain one connected to it to which it has said that it is ready.

    To one that sends messages before, libzmq closes the connection now and then.
    """
    (greeting,) = VECTORS["zmtp_greeting"].frames
    with zmq.Context() as context, context.socket(kind) as reader:
        reader.rcvtimeo, reader.linger = 10_000, 0
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as writer,
            writer.makefile("rb") as theirs,
        ):
            writer.sendall(greeting)
            assert theirs.read(64)[:1] == greeting[:1]
            flags, length = theirs.read(2)
            assert (flags, theirs.read(length)[:6]) == (4, b"\x05READY")
            yield reader, writer


@pytest.mark.parametrize(
    ("kind", "ready", "message", "received"),
    [
        (zmq.ROUTER, "dealer_rank0", "message_two_frames", [b"\0\0", b"\x02", b"\x92\x04\x01"]),
        (zmq.PULL, "push", "message_two_frames", [b"\x02", b"\x92\x04\x01"]),
        (zmq.XPUB, "xsub", "subscribe_message", [b"\x01"]),
    ],
)
def test_plain_sockets_speak_with_zmq_as_the_vectors_say(
    kind: int, ready: str, message: str, received: list[bytes]
) -> None:
    with open_reader(kind) as (reader, writer):
        writer.sendall(VECTORS[f"zmtp_ready_{ready}"].frames[0])
        writer.sendall(VECTORS[f"zmtp_{message}"].frames[0])
        assert reader.recv_multipart() == received
