"""What can be loaded is; what cannot is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dpkit.checkpoint import read_checkpoint
from dpkit.checkpoint.safetensors import SafetensorsFile, write_safetensors
from dpkit.engine.models import load_model
from dpkit.engine.models.torch import load_torch_model
from dpkit.engine.models.torch.architecture import read_architecture
from dpkit.errors import ModelNotFound, ModelUnsupported, OutOfMemory
from dpkit.messages import Batch, BatchRow, SamplingParams
from dpkit.names import Dtype, Quant
from dpkit.testing.tiny import write_tiny_directory, write_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_directory(tmp_path / "tiny")


def change_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_the_spec_says_what_the_files_say(tiny: Path, tmp_path: Path) -> None:
    for path in (tiny, write_tiny_gguf(tmp_path / "tiny.gguf")):
        spec = load_model(str(path), dtype=Dtype.FLOAT32).spec
        assert spec.max_model_len == 512
        assert spec.eos_token_ids == {0, 2}
        assert spec.vocab_size == 263
        assert spec.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_the_cache_is_as_large_as_the_spec_says(tiny: Path) -> None:
    model = load_model(str(tiny))
    cache = model.allocate(num_blocks=8, block_size=4)
    assert cache.nbytes == 8 * 4 * model.spec.kv_bytes_per_token


def test_a_missing_model_names_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPKIT_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="`dpkit fetch smollm2-135m` gets it"):
        load_model("smollm2-135m")


def test_a_missing_model_is_said_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from dpkit.engine.models import load_model\n"
        "from dpkit.errors import ModelNotFound\n"
        "try:\n    load_model('no-such-model')\n"
        "except ModelNotFound:\n    print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, r"tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ({"head_dim": 8}, r"tensor .*q_proj.weight' is \(64, 64\), but .* means \(32, 64\)"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "tensor .*0.self_attn.q_norm.weight' is missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'rope_scaling.factor' is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
    ],
)
def test_what_is_not_computed_is_named(tiny: Path, change: dict[str, Any], message: str) -> None:
    change_config(tiny, **change)
    with pytest.raises(ModelUnsupported, match=rf"tiny(/config\.json)?: {message}"):
        load_model(str(tiny))


def test_an_incomplete_config_is_named(tiny: Path) -> None:
    (tiny / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelUnsupported, match=r"config.json: 'num_attention_heads' is missing"):
        load_model(str(tiny))


def test_the_newer_way_to_write_rope_is_read(tiny: Path) -> None:
    change_config(
        tiny, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 7.0}
    )
    checkpoint = read_checkpoint(tiny)
    assert read_architecture(tiny, checkpoint.config).rope_theta == 7.0


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    file = SafetensorsFile(tiny / "model.safetensors")
    shapes = {name: shape for name, shape in file.shapes().items() if "layers.1.mlp" not in name}
    write_safetensors(tiny / "new.safetensors", shapes, file.read, on_bytes=lambda *_: None)
    (tiny / "new.safetensors").rename(tiny / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"'model.layers.1.mlp.gate_proj.weight' is missing"):
        load_model(str(tiny))


def test_a_head_that_the_config_promises_must_be_there(tiny: Path) -> None:
    change_config(tiny, tie_word_embeddings=False)
    with pytest.raises(ModelUnsupported, match=r"'lm_head.weight' is missing"):
        load_model(str(tiny))


def test_an_architecture_that_is_not_ours_says_what_may_bring_it(tiny: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    change_config(tiny, architectures=["OddForCausalLM"])
    message = r"architecture OddForCausalLM is not dpkit's own; `pip install 'dpkit\[hf\]'` brings"
    with pytest.raises(ModelUnsupported, match=message):
        load_model(str(tiny))


def test_an_architecture_that_is_not_ours_is_not_read_as_ours(tiny: Path) -> None:
    change_config(tiny, architectures=["OddForCausalLM"])
    message = "architecture OddForCausalLM is not supported; supported: Llama"
    with pytest.raises(ModelUnsupported, match=message):
        read_architecture(tiny, read_checkpoint(tiny).config)


def test_weights_that_are_not_ours_cannot_be_quantised(tiny: Path) -> None:
    change_config(tiny, architectures=["OddForCausalLM"])
    message = "quant = 'int4' is for dpkit's own architectures, not for OddForCausalLM"
    with pytest.raises(ModelUnsupported, match=message):
        load_model(str(tiny), quant=Quant.INT4)


def test_a_cache_larger_than_what_is_free_is_told(tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr("dpkit.engine.models.torch.model._physical_memory", lambda: 2**62)
    message = r"a KV cache of [\d,.]+ GiB does not fit into what is free"
    with pytest.raises(OutOfMemory, match=message):
        load_model(str(tiny)).allocate(num_blocks=2**40, block_size=16)


def test_a_cache_larger_than_the_machine_is_told(tiny: Path) -> None:
    message = r"a KV cache of [\d,.]+ GiB does not fit into this machine's [\d,.]+ GiB$"
    with pytest.raises(OutOfMemory, match=message):
        load_model(str(tiny)).allocate(num_blocks=2**40, block_size=16)


STEP = Batch(
    rows=(
        BatchRow(
            request_id="r",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(),
            token_ids=[1, 2, 3],
            start=0,
            block_ids=[1],
            output_index=0,
        ),
    )
)


def test_a_step_larger_than_what_is_free_is_told(tiny: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    model = load_torch_model(str(tiny))
    monkeypatch.setattr(model, "_transformer", refuse)
    cache = torch.zeros(3, 2, 4, 4, 2, 16)
    with pytest.raises(OutOfMemory, match="a step of 3 tokens needs more memory than is free: no"):
        model.execute(STEP, cache)


def test_what_else_a_step_fails_with_is_no_want_of_memory(tiny: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    model = load_torch_model(str(tiny))
    monkeypatch.setattr(model, "_transformer", refuse)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        model.execute(STEP, torch.zeros(3, 2, 4, 4, 2, 16))


def test_a_bias_that_the_config_does_not_name_is_named(tmp_path: Path) -> None:
    folder = write_tiny_directory(tmp_path / "tiny", mlp_bias=True)
    change_config(folder, mlp_bias=False)
    with pytest.raises(ModelUnsupported, match=r"a tensor 'model.layers.0.mlp.down_proj.bias', wh"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"sliding_window": 100}, 100),
        ({"sliding_window": 4096}, 512),
        ({"sliding_window": 100, "use_sliding_window": False}, 512),
        ({"sliding_window": 100, "use_sliding_window": True}, 100),
    ],
    ids=str,
)
def test_a_text_is_no_longer_than_the_window(tiny: Path, config: Any, longest: int) -> None:
    change_config(tiny, **config)
    assert load_model(str(tiny)).spec.max_model_len == longest


def test_a_python_without_torch_says_what_to_install(tiny: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dpkit.engine.models.torch.model", None)
    with pytest.raises(ModelUnsupported, match=r"needs dpkit.*; `pip install -c .*torch\]'"):
        load_model(str(tiny))


def test_an_engine_computes_with_as_many_threads_as_its_model_says(tiny: Path) -> None:
    model = load_torch_model(str(tiny))
    model.threads_per_engine = 3
    seen: list[int] = []

    def engine_thread() -> None:
        model.allocate(num_blocks=1, block_size=1)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=engine_thread)
    thread.start()
    thread.join()
    assert seen == [3]
    torch.set_num_threads(1)
