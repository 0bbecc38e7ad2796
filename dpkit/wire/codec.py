"""Bytes of vLLM's engine-core wire to structs, and back. Sans-IO: frames in, frames out.

Strict on what it writes: whole maps, all fields, never an empty or a mixed envelope. Lenient on
what it reads, as vLLM's own readers are: fields may be missing at the end or more than known,
unknown keys are skipped, arrays may lie inline or in frames of their own. Pickles are refused.

On any bytes, a `decode_` function gives a message or raises `WireError`, and nothing else. Knows no
socket, and no routing id either: a ROUTER's first frame is its user's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

from dpkit.errors import RequestRejected, WireError, describe
from dpkit.wire.structs import (
    VLLM_VERSION,
    CoordinatorPublish,
    Envelope,
    Hello,
    Init,
    ReadyResponse,
    StartWave,
    UtilityCall,
    WireRequest,
)
from dpkit.wire.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

T = TypeVar("T")

ADD, ABORT, START_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"  # the type frame of an input
SUBSCRIBE, UNSUBSCRIBE = b"\x01", b"\x00"  # what a subscriber sends an XPUB: to all, from all
COORDINATOR_READY = b"READY"  # all engines have subscribed; comes again whenever one more does
ENGINE_DEAD = b"ENGINE_CORE_DEAD"  # on every output socket, just before the process ends

MAX_MESSAGE_BYTES = 64 * 2**20
"""Most that is read, all frames together: a prompt of ten million tokens fits."""

INLINE_BYTES = 256
"""Arrays of that many bytes and more get a frame of their own, as vLLM's do."""

MAX_ENGINES = 2**16
"""Ranks have two bytes."""

_SCALE_MARKER = "SCALE_ELASTIC_EP"  # of a frontend that has changed the number of engines
_RAW = 3  # the extension type of raw bytes; 1 and 2 are Python pickles


class Add(Struct, frozen=True):
    """A new request."""

    request: WireRequest


class Abort(Struct, frozen=True):
    """Requests whose clients have left, by the ids that they were added under."""

    request_ids: tuple[str, ...]


class Utility(Struct, frozen=True):
    """A call that is answered at once, in an envelope of its own."""

    call: UtilityCall


class EngineDead(Struct, frozen=True):
    """The engine met a fatal error and says nothing more."""


class CoordinatorReady(Struct, frozen=True):
    """All engines have subscribed to the coordinator. A running engine ignores it."""


class Subscription(Struct, frozen=True):
    """A subscriber came or, after vLLM's fashion, left."""

    subscribed: bool


class ScaleElastic(Struct, frozen=True):
    """A frontend has changed the number of engines."""

    engines: int


# -- Encoding --------------------------------------------------------------------------------------


def rank_identity(rank: int) -> bytes:
    """The routing id of an engine: its rank in two bytes, little-endian."""
    return rank.to_bytes(2, "little")


def rank_of(identity: bytes) -> int:
    """The rank that a routing id says.

    Raises:
        WireError: it is none of an engine's.
    """
    if len(identity) != 2:
        raise WireError(f"an engine's routing id has 2 bytes, its rank; this one is {identity!r}")
    return int.from_bytes(identity, "little")


class _HasArrays(Exception):  # noqa: N818 - said by one encoder to have another do it
    """A message holds arrays, which few do."""


def _refuse(value: object) -> object:
    if isinstance(value, Tensor):
        raise _HasArrays
    raise TypeError(f"{type(value).__name__} does not travel")


_PLAIN = Encoder(enc_hook=_refuse)


def _encode(message: object) -> list[bytes]:
    """A payload, and a frame for each large array in it."""
    try:
        return [_PLAIN.encode(message)]
    except _HasArrays:
        return _encode_arrays(message)


def _encode_arrays(message: object) -> list[bytes]:
    frames = [b""]

    def place(value: object) -> object:
        if not isinstance(value, Tensor):
            return _refuse(value)
        if len(value.data) < INLINE_BYTES:
            return value.dtype, value.shape, Ext(_RAW, value.data)
        frames.append(value.data)
        return value.dtype, value.shape, len(frames) - 1  # the payload is frame 0

    frames[0] = Encoder(enc_hook=place).encode(message)
    return frames


def encode_input(message: Add | Abort | Utility) -> list[bytes]:
    """Frames from a frontend to an engine, the type frame first.

    Raises:
        RequestRejected: the request holds what no message can, such as text that is no Unicode.
    """
    if isinstance(message, Add):
        try:
            return [ADD, *_encode(message.request)]
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestRejected(
                f"cannot send request: {describe(error)}",
                request_id=message.request.external_req_id or message.request.request_id,
            ) from error
    if isinstance(message, Abort):
        return [ABORT, *_encode(message.request_ids)]
    return [UTILITY, *_encode(message.call)]


def encode_envelope(envelope: Envelope) -> list[bytes]:
    """Frames from an engine to a frontend, or to the coordinator.

    Raises:
        ValueError: the envelope is empty or of more than one kind; vLLM's frontend would turn
            unhealthy for good.
    """
    batch = envelope.outputs or not (
        envelope.scheduler_stats is None and envelope.finished_requests is None
    )
    others = (envelope.utility_output, envelope.wave_complete, envelope.start_wave)
    if bool(batch) + sum(other is not None for other in others) != 1:
        raise ValueError(f"an envelope must be of exactly one kind, not {envelope!r:.200}")
    return _encode(envelope)


def encode_hello(
    status: Literal["HELLO", "READY"],
    local: bool,
    headless: bool,
    parallel_config_hash: str | None = None,
) -> bytes:
    """HELLO or READY, from an engine to the owner of the handshake."""
    told = UNSET if parallel_config_hash is None else parallel_config_hash
    hello = Hello(status=status, local=local, headless=headless, parallel_config_hash=told)
    return _encode(hello)[0]


def encode_init(init: Init) -> bytes:
    """INIT, from the owner of the handshake to an engine."""
    return _encode(init)[0]


def encode_ready_response(response: ReadyResponse) -> bytes:
    """An engine's first message on an input socket."""
    return _encode(response)[0]


def encode_publish(publish: CoordinatorPublish) -> bytes:
    """What the coordinator tells every frontend."""
    return _encode(publish)[0]


def encode_start_wave(start: StartWave) -> list[bytes]:
    """Frames from the coordinator to every engine."""
    return [START_WAVE, *_encode(start)]


def encode_scale(scale: ScaleElastic) -> bytes:
    """What a frontend that has changed the number of engines tells the coordinator."""
    return _encode((_SCALE_MARKER, scale.engines))[0]


# -- Decoding --------------------------------------------------------------------------------------


def _unpacked(code: int, data: memoryview) -> bytes:
    if code == _RAW:
        return bytes(data)
    what = "a Python pickle, which dpkit does not open" if code in {1, 2} else "unknown"
    raise ValueError(f"extension type {code} is {what}")


def _tensors_of(frames: Sequence[bytes]) -> Callable[[type, Any], Any]:
    """A hook that makes arrays of (dtype, shape, bytes or the number of a frame)."""

    def tensor(_kind: type, value: Any) -> Tensor:
        match value:
            case [str(dtype), [*shape], bytes(data)] if _is_shape(shape):
                return Tensor(dtype, shape, data)
            case [str(dtype), [*shape], int(number)] if _is_shape(shape):
                if not 0 < number < len(frames):
                    raise ValueError(f"an array lies in frame {number} of {len(frames)}")
                return Tensor(dtype, shape, bytes(frames[number]))
        raise ValueError("expected an array: its dtype, shape, and bytes or frame number")

    return tensor


def _is_shape(shape: list[Any]) -> bool:
    return all(type(size) is int and size >= 0 for size in shape)


def _decoder(kind: type[T] | Any, frames: Sequence[bytes] = ()) -> Decoder[T]:
    return Decoder(kind, ext_hook=_unpacked, dec_hook=_tensors_of(frames))


# Made once: a typed decoder costs as much to make as a small message to read.
_REQUEST: Decoder[WireRequest] = _decoder(WireRequest)
_ABORT: Decoder[tuple[str, ...]] = _decoder(tuple[str, ...])
_CALL: Decoder[UtilityCall] = _decoder(UtilityCall)
_ENVELOPE: Decoder[Envelope] = _decoder(Envelope)
_HELLO: Decoder[Hello] = _decoder(Hello)
_INIT: Decoder[Init] = _decoder(Init)
_READY: Decoder[ReadyResponse] = _decoder(ReadyResponse)
_PUBLISH: Decoder[CoordinatorPublish] = _decoder(CoordinatorPublish)
_START_WAVE: Decoder[StartWave] = _decoder(StartWave)
_SCALE: Decoder[tuple[str, int]] = _decoder(tuple[str, int])


def _decode(decoder: Decoder[T], what: str, frames: Sequence[bytes], limit: int) -> T:
    """Read one message, whose payload is the first frame.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
    if size > limit:
        raise WireError(f"{what} has {size:,} bytes, and {limit:,} are the most that is read")
    if len(frames) > 1:
        decoder = _decoder(decoder.type, frames)
    try:
        return decoder.decode(frames[0])
    except Exception as error:  # the world's bytes may bring up anything, recursion too
        parts = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
        raise WireError(
            f"cannot read {what}: {describe(error)} ({size:,} bytes in {parts}; "
            f"expected is the layout of vLLM {VLLM_VERSION})"
        ) from error


def decode_input(
    frames: Sequence[bytes], *, limit: int = MAX_MESSAGE_BYTES
) -> Add | Abort | Utility:
    """What a frontend sent to an engine: the type frame, the payload, and frames of arrays.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    if len(frames) < 2:
        raise WireError(f"an input has a type and a payload; this one has {len(frames)} frames")
    kind, *rest = frames
    if kind == ADD:
        return Add(_decode(_REQUEST, "a request", rest, limit))
    if kind == ABORT:
        return Abort(_decode(_ABORT, "an abort", rest, limit))
    if kind == UTILITY:
        return Utility(_decode(_CALL, "a utility call", rest, limit))
    raise WireError(f"an input's type is 00, 01 or 03, not {kind[:8].hex() or 'empty'}")


def decode_output(
    frames: Sequence[bytes], *, limit: int = MAX_MESSAGE_BYTES
) -> Envelope | EngineDead:
    """What an engine sent to a frontend, or to the coordinator.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    if not frames:
        raise WireError("an output has at least one frame")
    if frames[0] == ENGINE_DEAD:
        return EngineDead()
    return _decode(_ENVELOPE, "an output", frames, limit)


def decode_hello(payload: bytes, *, limit: int = MAX_MESSAGE_BYTES) -> Hello:
    """HELLO or READY of an engine.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    return _decode(_HELLO, "a HELLO or READY", [payload], limit)


def decode_init(payload: bytes, *, limit: int = MAX_MESSAGE_BYTES) -> Init:
    """INIT of the owner of the handshake.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    return _decode(_INIT, "an INIT", [payload], limit)


def decode_ready_response(
    payload: bytes, *, limit: int = MAX_MESSAGE_BYTES
) -> ReadyResponse | None:
    """An engine's first message to a frontend; None: an empty one, which says nothing.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    return _decode(_READY, "a ready response", [payload], limit) if payload else None


def decode_from_coordinator(
    frames: Sequence[bytes], *, limit: int = MAX_MESSAGE_BYTES
) -> CoordinatorReady | StartWave:
    """What the coordinator sent to an engine.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    if len(frames) == 1 and frames[0] == COORDINATOR_READY:
        return CoordinatorReady()
    if len(frames) < 2 or frames[0] != START_WAVE:
        raise WireError(f"neither READY nor a wave, from the coordinator: {len(frames)} frames")
    return _decode(_START_WAVE, "the start of a wave", frames[1:], limit)


def decode_publish(payload: bytes, *, limit: int = MAX_MESSAGE_BYTES) -> CoordinatorPublish:
    """What the coordinator tells every frontend.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    return _decode(_PUBLISH, "a coordinator's publish", [payload], limit)


def decode_to_coordinator(
    payload: bytes, *, limit: int = MAX_MESSAGE_BYTES
) -> Subscription | ScaleElastic:
    """What a frontend or an engine sent up a coordinator's publishing socket.

    Raises:
        WireError: it cannot be read, or is larger than `limit` bytes.
    """
    if payload in {SUBSCRIBE, UNSUBSCRIBE}:
        return Subscription(payload == SUBSCRIBE)
    marker, engines = _decode(_SCALE, "a subscriber's word", [payload], limit)
    if marker != _SCALE_MARKER:
        raise WireError(f"a subscriber said {marker[:40]!r}, which is unknown")
    if not 1 <= engines <= MAX_ENGINES:
        raise WireError(f"there cannot be {engines:,} engines, but 1 to {MAX_ENGINES:,}")
    return ScaleElastic(engines)
