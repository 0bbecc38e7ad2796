"""`dpkit explain`: what it says, what it counts, and that it starts and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.balancer.policies.kv_pressure import KvPressure
from dpkit.balancer.policies.queue_weighted import QueueWeighted
from dpkit.cli.explain import POLICIES, explain_policy
from dpkit.cli.main import main
from dpkit.config.units import show_duration
from dpkit.costmodel import PRESETS
from dpkit.engine.models.torch import precision
from dpkit.names import PolicyName
from dpkit.nursery.supervisor import Restarts, RestartWindow

if TYPE_CHECKING:
    from collections.abc import Callable

    Explain = Callable[..., str]

EXAMPLE = Path(__file__).parents[2] / "dpkit.toml"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
}
BYTES_PER_TOKEN = 2 * 2 * 2 * 2 * 4  # layers, K and V, heads, head_dim, float32


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(file: Path, *flags: str) -> str:
        assert main(["explain", str(file), *flags]) == 0
        out, err = capsys.readouterr()
        assert not err
        return out

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(SHAPE))
    path = tmp_path / "dpkit.toml"
    path.write_text('[[engines]]\nmodel = "./weights"\ncount = 3\n')
    return path


def _group(out: str) -> dict[str, Any]:
    (group,) = json.loads(out)["engines"]
    assert isinstance(group, dict)
    return group


def test_every_policy_has_its_sentence_and_no_other() -> None:
    assert set(POLICIES) == set(PolicyName)
    assert all(sentence.endswith(".") for sentence in POLICIES.values())
    assert "your own class" in explain_policy("my.pkg:Policy")


def test_the_sentences_numbers_are_the_policies() -> None:
    kv, queue = KvPressure(), QueueWeighted()
    assert (
        f"{kv.kv_weight:g} * waiting * max(0, KV usage - {kv.kv_threshold})"
        in (POLICIES[PolicyName.KV_PRESSURE])
    )
    assert f"{queue.waiting_weight} * waiting" in POLICIES[PolicyName.QUEUE_WEIGHTED]


def test_words_tell_engines_memory_budget_balancing_loss_and_end(explain: Explain) -> None:
    flags = ["engines.0.model=cost:h200-8b", "admission.max_inflight=9"]
    out = " ".join(explain(EXAMPLE, *(word for flag in flags for word in ("--set", flag))).split())
    for said in [
        "2 engines of cost:h200-8b",
        "smol-0 and smol-1 are processes, forked from one that loads the model, and heard over",
        "800,000 tokens in 50,000 blocks of 16: room for 781 requests of typical length (1,024 ",
        "at most 256 running requests and 8,192 tokens",
        f"By policy expected_ttft, {POLICIES[PolicyName.EXPECTED_TTFT]}",
        "at most every 100ms",
        "up to 9 requests of a client. 1,024 more may wait, for at most 1m; others are refused",
        "When an engine dies, only its own requests notice. One that has got nothing yet is",
        "placed again, once; another ends with EngineLost",
        "smol: an engine that fails starts again after 100ms, then 200ms, then 400ms (more or",
        "after 4 failures within 1m it is given up. A step of more than 2m counts as a failure",
        "After 3 losses in a row it is left out for 1s, each further time for that much longer",
        "at most 1m; never more than 1 of 2 at once.",
        "When all are given up, the cluster ends, cleanly: your block is cancelled",
        "ClusterFailed carries the first error.",
        "no more requests are taken; those in flight may finish within 8s",
        "within 10s",
    ]:
        assert said in out


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ("inflight", "gets its engine the moment it comes. By policy inflight"),
        ("expected_ttft", "gets its engine when that could begin it with the next step"),
        ("not.there:Mine", "unless its policy, which is not loaded for this, can hold it. By"),
    ],
)
def test_words_tell_when_requests_are_bound(explain: Explain, policy: str, bound: str) -> None:
    out = " ".join(explain(EXAMPLE, "--set", f"balancer.policy={policy}").split())
    assert bound in out
    how = "at once" if policy == "inflight" else "as said"
    assert f"requests go to engines {how}, while an engine is ready" in out


@pytest.mark.parametrize("binding", ["early", "late"])
def test_of_your_own_policy_words_tell_the_binding_that_is_asked_for(
    explain: Explain, binding: str
) -> None:
    asked = ("--set", "balancer.policy=not.there:Mine", "--set", f"balancer.binding={binding}")
    out = " ".join(explain(EXAMPLE, *asked).split())
    assert "not loaded for this" not in out
    assert f"requests go to engines {'at once' if binding == 'early' else 'as said'}" in out


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "engines.0.supervision.intensity=0",
            "smol: at the first failure of an engine it is given",
        ),
        (
            "engines.0.supervision.intensity=5",
            "100ms, then 200ms, then 400ms and so on, at most 10s (more or less by 10%); after 6",
        ),
        (
            "engines.0.supervision={ strategy = 'one_for_all', backoff_max = '150ms' }",
            "all engines together start again after 100ms, then 150ms, then 150ms (more or less",
        ),
        (
            "engines.0.supervision={ strategy = 'one_for_all', intensity = 0 }",
            "at the first failure of an engine all are given up",
        ),
        ("engines.0.kind=local", "smol-0 and smol-1 are tasks in this process."),
        ("engines.0.kind=local", "all is gone within 10s and the rest of one step."),
        ("engines.0.kind=process", "all is gone within 10s."),
        ("engines.0.count=1", "smol-0 is a process of its own, forked from one that loads"),
        (
            "engines.0.process={ start = 'spawn', transport = 'tcp' }",
            "processes, which load the model for themselves, and heard over TCP on 127.0.0.1.",
        ),
        ("engines.0.count=3", "A step of more than 2m counts as a failure; the process is killed."),
        ("admission.retries=0", "Each ends with EngineLost, and what came of it can be read."),
        ("admission.retries=3", "is placed again, up to 3 times; another ends"),
        ("admission.retry_budget=0.5", "When losses add up, at most 50% of the requests of 10 s"),
        ("admission.resume=true", "Each goes on elsewhere from what it has said, once; then"),
        ("balancer.eject_max_share=0", "has its first token. When all are given up"),
        ("cluster.min_ready=2", "When fewer than 2 are left that are not given up, the cluster"),
        ("cluster.pre_stop=2s", "requests are taken for another 2s, then no more; those in flight"),
        ("cluster.kill_after=5s", "may finish within 5s, then they are ended by force"),
        ("admission.max_inflight=1", "up to 1 request of a client"),
    ],
)
def test_what_happens_on_a_loss_and_at_the_end_is_told_by_the_numbers(
    explain: Explain, flag: str, said: str
) -> None:
    assert said in " ".join(explain(EXAMPLE, "--set", flag).split())


def test_without_retries_there_is_no_budget_to_tell_of(explain: Explain) -> None:
    assert "losses add up" in explain(EXAMPLE)
    assert "losses add up" not in explain(EXAMPLE, "--set", "admission.retries=0")


def test_an_engine_on_its_own_is_not_told_of_others(explain: Explain) -> None:
    flags = ["engines.0.count=1", "engines.0.supervision.strategy=one_for_all"]
    out = " ".join(explain(EXAMPLE, *(word for flag in flags for word in ("--set", flag))).split())
    assert "an engine that fails starts again" in out
    assert "never more than" not in out, "the only one is never left out"


def test_of_engines_that_step_together_the_lost_one_may_be_left_out(explain: Explain) -> None:
    flags = ["coordinator.wave_coordination=true", "engines.0.supervision.strategy=all_but_one"]
    out = " ".join(explain(EXAMPLE, *(word for flag in flags for word in ("--set", flag))).split())
    assert "all engines but those that failed in the last 1m start again after" in out


def test_the_waits_are_the_supervisors_own(explain: Explain) -> None:
    window = RestartWindow(Restarts())
    waits = [window.delay(0.0, RuntimeError()) for _ in range(3)]
    shown = ", then ".join(show_duration(wait) for wait in waits if wait is not None)
    assert f"starts again after {shown}" in " ".join(explain(EXAMPLE).split())
    assert window.delay(0.0, RuntimeError()) is None, "the fourth failure"


def test_of_a_model_that_is_here_config_json_is_enough(explain: Explain, file: Path) -> None:
    exact = ["--set", "engines.0.dtype=float32"]
    group = _group(explain(file, "--json", "--set", "engines.0.kv.memory=1MiB", *exact))
    blocks = 2**20 // BYTES_PER_TOKEN // 16
    assert group["note"] is None
    assert group["max_model_len"] == 512
    assert group["kv"] == {
        "tokens": blocks * 16,
        "blocks": blocks,
        "block_size": 16,
        "bytes": blocks * 16 * BYTES_PER_TOKEN,
        "typical_tokens": 512,  # no request is longer than the model
        "typical_requests": blocks // 32,
    }
    assert "engine-0 to engine-2 are tasks" in explain(file)


def test_the_cache_holds_what_the_model_computes_in(explain: Explain, file: Path) -> None:
    def tokens(*flags: str) -> int:
        keys = [f"engines.0.{flag}" for flag in ("kv.memory=1MiB", *flags)]
        words = [word for key in keys for word in ("--set", key)]
        found = _group(explain(file, "--json", *words))["kv"]["tokens"]
        assert isinstance(found, int)
        return found

    assert tokens("dtype=bfloat16") == tokens("quant=int4")
    assert tokens("dtype=bfloat16") // 32 == tokens("dtype=float32") // 16
    assert tokens() in {tokens("dtype=bfloat16"), tokens("dtype=float32")}


def test_an_architecture_that_transformers_may_know_is_told(explain: Explain, file: Path) -> None:
    config = file.parent / "weights" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OddForCausalLM"))
    group = _group(explain(file, "--json"))
    assert group["note"] is None
    assert group["max_model_len"] == 512


def test_a_model_that_is_not_here_is_told_and_the_rest_goes_on(
    explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPKIT_CACHE", str(tmp_path))
    out = " ".join(explain(EXAMPLE).split())
    assert "`dpkit fetch smollm2-135m` gets it" in out
    assert "KV cache: as large as the model says when it is loaded" in out
    assert "When an engine dies" in out
    sized = ["--set", "engines.0.kv.num_blocks=100", "--set", "engines.0.scheduler.max_num_seqs=7"]
    group = _group(explain(EXAMPLE, "--json", *sized))
    assert (group["kv"]["tokens"], group["kv"]["bytes"]) == (1600, None)
    assert (group["max_num_seqs"], group["max_num_batched_tokens"]) == (7, None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"architectures": ["OddForCausalLM"]}', "OddForCausalLM: 'num_attention_heads' is missi"),
        (json.dumps(SHAPE | {"num_hidden_layers": "64"}), "'num_hidden_layers' must be a whole n"),
        (json.dumps(SHAPE | {"rope_scaling": []}), "'rope_scaling' must be an object, not []"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
    ],
    ids=["unknown", "number", "rope", "nested"],
)
def test_a_model_that_cannot_be_run_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], file: Path, config: str, said: str
) -> None:
    path = file.parent / "weights" / "config.json"
    path.write_text(config)
    assert main(["explain", str(file)]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {path}: ")
    assert said in err
    assert err.count("\n") == 1
    assert not out


def test_what_auto_comes_to_is_told(
    explain: Explain, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(precision, "cpu_is_fast_at_bfloat16", lambda fast=is_fast: fast)
        assert f"computed in {dtype} (auto)." in " ".join(explain(file).split())
        assert _group(explain(file, "--json"))["computed_in"] == dtype


def test_a_pool_without_a_block_is_told(explain: Explain, file: Path) -> None:
    note = _group(explain(file, "--json", "--set", "engines.0.kv.memory=1B"))["note"]
    assert note.startswith("it would not start: engines.engine.kv.memory: must be at least")


def test_your_own_classes_are_not_imported(explain: Explain, file: Path) -> None:
    flags = ["--set", "engines.0.model=antigravity:Model", "--set", "balancer.policy=this:Policy"]
    assert "your own class" in explain(file, *flags)
    assert not {"antigravity", "this"} & set(sys.modules)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_room_for_a_typical_request(explain: Explain, preset: str) -> None:
    group = _group(explain(EXAMPLE, "--json", "--set", f"engines.0.model=cost:{preset}"))
    assert group["kv"]["typical_requests"] >= 1


def test_switches_are_told(explain: Explain, file: Path) -> None:
    flags = ["coordinator.publish=false", "engines.0.dtype=bfloat16", "engines.0.quant=int4"]
    out = " ".join(explain(file, *(word for flag in flags for word in ("--set", flag))).split())
    assert "Engines publish no counts" in out
    assert "computed in bfloat16, weights in int4" in out
    on_gpu = explain(file, "--set", "engines.0.device=cuda")
    assert "computed in bfloat16 (auto) on cuda" in " ".join(on_gpu.split())
    waves = explain(file, "--set", "coordinator.wave_coordination=true")
    assert "Engines step together" in waves


def test_neither_torch_nor_trio_is_imported(file: Path) -> None:
    code = "import sys; from dpkit.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", str(file)],
        check=True,
        capture_output=True,
        text=True,
        timeout=15,
    )
    assert not set(done.stdout.splitlines()[-1].split()) & {"torch", "trio", "zmq", "transformers"}


JOINING = """
[[engines]]
name = "first"
model = "./weights"
count = 2

[[engines]]
name = "gpu"
kind = "vllm"
model = "./weights"
count = 3
vllm.handshake = "tcp://0.0.0.0:29550"
vllm.host = "10.0.0.1"
"""


def test_engines_that_join_are_told_of_with_the_commands_that_start_them(
    explain: Explain, file: Path
) -> None:
    file.write_text(JOINING)
    weights = file.parent / "weights"
    out = explain(file)
    assert "gpu-0 to gpu-2 are engines that somebody else starts." in out
    assert "They join at tcp://10.0.0.1:29550" in out
    start = f"    vllm serve {weights} --headless --data-parallel-size 3"
    where = "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550"
    assert f"{start} --data-parallel-size-local 3 {where}\n" in out
    assert f"{start} --data-parallel-size-local 1 --data-parallel-start-rank RANK {where}\n" in out
    assert "gpu: an engine is lost when its connection drops" in out
    _, gpu = json.loads(explain(file, "--json"))["engines"]
    assert [f"    {each}" for each in gpu["start_with"]] == [
        line for line in out.splitlines() if line.startswith("    vllm serve")
    ]


def test_of_engines_that_join_and_step_together_it_says_where_and_how_they_end(
    explain: Explain, file: Path
) -> None:
    _, joining = JOINING.split("[[engines]]", 1)[1].split("[[engines]]")
    together = 'vllm.rendezvous = "10.0.0.2:29560"\nsupervision.strategy = "one_for_all"\n'
    file.write_text(f"[[engines]]{joining}{together}[coordinator]\nwave_coordination = true\n")
    out = " ".join(explain(file).split())
    assert "Rank 0 is to be where 10.0.0.2:29560 is, and the four ports after that must" in out
    assert "takes no other with it" not in out
    assert "All others are lost with it, as they step together" in out
    assert "ends those that are left, and starts all again" in out


@pytest.mark.parametrize(
    ("host", "said"), [("tcp://[::1]:29550", "--data-parallel-address ::1"), ("tcp://h:*", "PORT")]
)
def test_addresses_are_given_as_vllm_takes_them(
    explain: Explain, file: Path, host: str, said: str
) -> None:
    file.write_text(JOINING.replace("tcp://0.0.0.0:29550", host).replace('"10.0.0.1"', '"h"'))
    if "[" in host:
        file.write_text(file.read_text().replace('vllm.host = "h"', ""))
    out = explain(file)
    assert said in out
    assert ("The port is picked at the start" in out) == ("*" in host)


def test_a_model_that_only_dpkit_has_is_served_by_dpkit(explain: Explain, file: Path) -> None:
    file.write_text(JOINING.replace("./weights", "echo"))
    ranks = "for RANK in 2 3 4; do dpkit engine --config"
    where = '--rank "$RANK" --handshake tcp://10.0.0.1:29550 --redial 10s & done; wait'
    assert f"    {ranks} {file} {where}\n" in explain(file)


def test_what_long_prompts_leave_others_is_told(explain: Explain, file: Path) -> None:
    assert "Long prompts" not in explain(file)
    file.write_text('[[engines]]\nmodel = "echo"\nscheduler.long_prefill_share = 0.7\n')
    assert "tokens. Long prompts leave others 30% of it." in explain(file)
