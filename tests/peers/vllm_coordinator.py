"""vLLM's own coordinator, for whoever connects; its addresses are told as one JSON array.

Runs in vLLM's environment and knows nothing of dpkit. ``vllm_coordinator.py ENGINES`` serves until
it is ended.
"""

from __future__ import annotations

import json
import sys

from vllm.v1.engine.coordinator import DPCoordinatorProc

ANY = "tcp://127.0.0.1:0"


class Pipe:
    """To whoever has started a coordinator."""

    def send(self, addresses: tuple[str, str, str]) -> None:
        """Tell them: for clients, what engines say by, what they hear by."""
        print(json.dumps(addresses), flush=True)

    def close(self) -> None:
        """There is nothing to close."""


if __name__ == "__main__":
    DPCoordinatorProc.run_coordinator(int(sys.argv[1]), ANY, ANY, ANY, Pipe())
