"""The real frontend, where it is; loudly skipped where it is not."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.byte_model import write_byte_model
from tests.peers.fetch import cached_path
from tests.peers.harness import open_frontend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.peers.harness import Served

    Serve = Callable[..., AbstractContextManager[Served]]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm_rs() -> Path:
    """The program: `$DPKIT_VLLM_RS`, or what `python tests/peers/fetch.py` has fetched."""
    path = Path(os.environ.get("DPKIT_VLLM_RS") or cached_path())
    if not path.is_file():
        pytest.skip(f"VLLM'S FRONTEND IS NOT AT {path}: `python tests/peers/fetch.py` gets it")
    return path


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a frontend of echo engines is told that they serve."""
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """What makes processes of ours find this tree and this interpreter."""
    return {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_SERVER_DEV_MODE": "1",  # the frontend then has routes for utility calls
    }


@pytest.fixture(scope="session")
def serve(
    vllm_rs: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Serve:
    """Opens a frontend of two `dpkit engine`s, given a config and what the frontend reads.

    Options of the engines may follow; what has a name is for `open_frontend`.
    """

    @contextmanager
    def opened(toml: str, model: Path, *engine_options: str, **options: Any) -> Iterator[Served]:
        folder = tmp_path_factory.mktemp("served")
        config = folder / "dpkit.toml"
        config.write_text(toml)

        def engine(rank: int, handshake: str) -> list[str]:
            command = [sys.executable, "-m", "dpkit", "engine", "--config", str(config)]
            return [*command, "--rank", str(rank), "--handshake", handshake, *engine_options]

        with open_frontend(
            vllm_rs, model, engine, folder, environment=environment, **options
        ) as served:
            yield served

    return opened
