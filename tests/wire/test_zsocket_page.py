"""docs/wire.md: its ZeroMQ example runs as it stands there, and what it says of limits is so."""

from __future__ import annotations

from dpkit.wire import handshake, zsocket
from tests.documented import output_of, page

PAGE = page("wire.md")
SECTION = PAGE.partition("## ZeroMQ for Trio")[2]


def test_the_example_runs() -> None:
    assert output_of(SECTION) == "[b'hello', b'world']\n"


def test_its_numbers_are_the_modules() -> None:
    assert f"after {zsocket.BURST} messages at the latest" in SECTION
    assert f"{zsocket.MAX_MESSAGE_BYTES // 2**20} MiB for one frame" in SECTION
    assert f"{handshake.INIT_PATIENCE:.0f} s for INIT" in SECTION
    assert f"{handshake.COORDINATOR_PATIENCE:.0f} s for the coordinator" in SECTION
    assert f"READY lingers up to {handshake.HANDSHAKE_LINGER_MS // 1000} s" in SECTION
    assert f"outputs up to {handshake.OUTPUT_LINGER_MS // 1000} s" in SECTION
