"""vLLM's real frontend, told that its model has experts, over dpkit's engines in lockstep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.peers.byte_model import write_byte_model_of_experts
from tests.peers.harness import open_server

pytestmark = [pytest.mark.peer, pytest.mark.timeout(120)]
pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_engines.py"
LOCKSTEP = """
[[engines]]
model = "echo"
count = 2
kv = { block_size = 16, num_blocks = 512 }

[coordinator]
wave_coordination = true

[log]
level = "debug"
"""


def test_waves_follow_each_other_under_vllms_own_coordinator(
    vllm_rs: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    model = write_byte_model_of_experts(tmp_path / "model")
    (tmp_path / "dpkit.toml").write_text(LOCKSTEP)
    told = environment | {"DPKIT_CONFIG": str(tmp_path / "dpkit.toml")}
    with open_server(vllm_rs, model, EXAMPLE, tmp_path, count=2, environment=told) as served:
        for number in range(4):
            answer = served.complete(f"wave {number}", max_tokens=40)
            assert answer["choices"][0]["text"] == f"wave {number}"
    log = served.log.read_text()
    assert "model_is_moe=true" in log
    words = re.findall(r"tells the coordinator: (\w+ \d+)", log)
    assert [word for word in words if word.startswith("wave_complete")][:3] == [
        "wave_complete 0",
        "wave_complete 1",
        "wave_complete 2",
    ]
    assert {"start_wave 0", "start_wave 1", "start_wave 2", "start_wave 3"} <= {*words}
