"""Our own OpenAPI document, tried by Schemathesis: whatever it allows and forbids, no 5xx."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

schemathesis: Any = pytest.importorskip("schemathesis", reason="pip install 'dpkit[peers]'")

pytestmark = pytest.mark.slow

EXAMPLES = 150
CONFIG = """
[[engines]]
model = "echo"
count = 2

[server]
listen = "127.0.0.1:0"
"""
STATUSES = {200, 400, 404, 405, 413, 431}
"""What there is for who asks alone, and in time; `timeout` is the client's to choose: 504."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[str]:
    """Where echo engines are served. In the end nothing is left of any request."""
    path: Path = tmp_path_factory.mktemp("served") / "dpkit.toml"
    path.write_text(CONFIG)
    with subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", str(path), "--json", "--audit"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        [address] = json.loads(process.stdout.readline())["serving"]["addresses"]
        try:
            yield address
            process.terminate()
            _, err = process.communicate(timeout=120)  # a long answer, on a busy machine
            assert (process.returncode, err) == (0, "")
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_whatever_the_document_allows_or_forbids_is_answered_well(url: str, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    wanted = getattr(schemathesis.GenerationMode, mode)
    tried = dict[int, int]()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "NEGATIVE" and not operation.body:
            continue  # what asks for nothing cannot be asked wrongly

        @given(case=operation.as_strategy(generation_mode=wanted))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            answer = case.call(base_url=url, timeout=120)  # a long answer, on a busy machine
            tried[answer.status_code] = tried.get(answer.status_code, 0) + 1
            late = answer.status_code == 504 and b"timeout" in (case.body or {}).__repr__().encode()
            assert late or answer.status_code in STATUSES, answer.content
            if answer.status_code >= 400:
                error = json.loads(answer.content)["error"]
                assert set(error) == {"message", "type", "param", "code"}

        ask()
    print(mode, tried)
    assert tried[200 if mode == "POSITIVE" else 400] > 0
