"""Damaged model files: whatever is wrong with them, the refusal names file and key."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpkit.checkpoint.fields import read_text
from dpkit.checkpoint.gguf import GgufFile
from dpkit.checkpoint.safetensors import SafetensorsFile
from dpkit.engine.models import load_model
from dpkit.errors import DpkitError, ModelUnsupported
from dpkit.testing.tiny import write_tiny_directory, write_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors",
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("whole"), num_hidden_layers=1)


@pytest.fixture
def tiny(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "tiny")


def load(path: Path) -> None:
    """All that a cluster does with a model's files before its first step."""
    load_model(str(path)).tokenizer().encode("hello")


def is_refused_or_loads(path: Path) -> None:
    said = f"{path}: nothing wrong"
    try:
        load(path)
    except DpkitError as error:
        said = str(error)
    assert str(path) in said
    assert "\n" not in said


def rewrite(path: Path, **change: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [5]),
        ("architectures", {"a": 1}),
        ("num_hidden_layers", "64"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", {}),
        ("num_attention_heads", None),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("hidden_size", 10**12),
        ("vocab_size", -1),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", "512"),
        ("max_position_embeddings", None),
        ("sliding_window", "100"),
        ("use_sliding_window", 1),
        ("rms_norm_eps", []),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "1e4"),
        ("rope_theta", 0),
        ("rope_theta", 10**400),
        ("rope_scaling", []),
        ("rope_parameters", "llama3"),
        ("attention_bias", "no"),
        ("tie_word_embeddings", 5),
    ],
    ids=str,
)
def test_a_wrong_value_of_the_config_is_named_by_file_and_key(
    tiny: Path, key: str, value: Any
) -> None:
    rewrite(tiny / "config.json", **{key: value})
    with pytest.raises(ModelUnsupported, match=rf"tiny/config.json: .*{key}"):
        load(tiny)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 0),
        ("factor", "8"),
        ("high_freq_factor", 1.0),
        ("low_freq_factor", None),
        ("original_max_position_embeddings", []),
        ("rope_type", 5),
    ],
)
def test_a_wrong_rope_scaling_is_named_by_file_and_key(tiny: Path, key: str, value: Any) -> None:
    rewrite(tiny / "config.json", rope_scaling=LLAMA3)
    load(tiny)
    rewrite(tiny / "config.json", rope_scaling=LLAMA3 | {key: value})
    with pytest.raises(ModelUnsupported, match=rf"tiny/config.json: 'rope_scaling.{key}' "):
        load(tiny)


@pytest.mark.parametrize("eos", ["x", 1.5, ["a"], [[1]], {}, -1, [None], True, [True], [-1]])
def test_wrong_end_tokens_are_named_by_their_file(tiny: Path, eos: Any) -> None:
    rewrite(tiny / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelUnsupported, match=r"_config.json: 'eos_token_id' must be .*, not ."):
        load(tiny)


@pytest.mark.parametrize("template", [[{}], [5], 5, {"a": "b"}, [{"name": 1, "template": ""}]])
def test_a_wrong_chat_template_is_named_by_its_file(tiny: Path, template: Any) -> None:
    rewrite(tiny / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelUnsupported, match=r"tokenizer_config.json: 'chat_template"):
        load(tiny)


@pytest.mark.parametrize("template", ["{% for %}", "{% if %}", "{{ " + "(" * 5000])
def test_a_chat_template_that_is_none_is_refused(tiny: Path, template: str) -> None:
    (tiny / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelUnsupported, match=r"tiny: chat template(, line 1)?: \w+Error"):
        load(tiny)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": "1.0"', '{"model": {}}'])
def test_a_damaged_tokenizer_is_named(tiny: Path, text: str) -> None:
    (tiny / "tokenizer.json").write_text(text)
    with pytest.raises(ModelUnsupported, match=r"tiny: tokenizer.json is damaged"):
        load(tiny)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_text_or_no_object_is_named(tiny: Path, name: str) -> None:
    for data in (b"\xff\xfe", b"[" * 100_000, b"5", b""):
        (tiny / name).unlink()  # what is mapped must not be written into
        (tiny / name).write_bytes(data)
        with pytest.raises(ModelUnsupported, match=name):
            load(tiny)


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe", "not UTF-8 text; fetch it again"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b"5", "a JSON object is expected"),
        (b"", "not valid JSON: Expecting value"),
    ],
    ids=["bytes", "deep", "number", "empty"],
)
def test_what_is_wrong_with_a_file_is_said(tiny: Path, name: str, data: bytes, said: str) -> None:
    (tiny / name).write_bytes(data)
    with pytest.raises(ModelUnsupported, match=f"{name}: {said}"):
        load(tiny)


def test_a_template_is_refused_by_its_line(tiny: Path) -> None:
    (tiny / "chat_template.jinja").write_text("hello\n{% if %}")
    with pytest.raises(ModelUnsupported, match=r"chat template, line 2: TemplateSyntaxError"):
        load(tiny)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened: a way to be unreadable that root has not either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("read", [read_text, SafetensorsFile, GgufFile])
def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    (path := tmp_path / "file").write_bytes(b"GGUF")
    with no_descriptors(), pytest.raises(ModelUnsupported) as caught:
        read(path)
    assert str(caught.value) == f"{path}: cannot be read: Too many open files"


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "chat_template.jinja"])
def test_a_directory_or_a_pipe_in_a_files_place_is_named(tiny: Path, name: str) -> None:
    for make, kind in ((os.mkdir, "a directory"), (os.mkfifo, "no file")):
        (tiny / name).unlink(missing_ok=True)
        make(tiny / name)
        said = rf"{name}: a file is expected, and this is {kind}$"
        with pytest.raises(ModelUnsupported, match=said):
            load(tiny)
        (tiny / name).rmdir() if make is os.mkdir else (tiny / name).unlink()


@pytest.mark.parametrize("name", [5, None, "..", "../other.safetensors", "a.bin", ["a"], "\0"])
def test_an_index_names_files_of_the_directory(tiny: Path, name: Any) -> None:
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelUnsupported, match=r"index.json: not an index of safetensors files"):
        load(tiny)


def with_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file; the data stays."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.dumps(edit(json.loads(data[8 : 8 + length]))).encode()
    file.unlink()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.mark.parametrize("header", [[], 5, "x", None])
def test_a_header_that_is_no_object_is_refused(tiny: Path, header: object) -> None:
    with_header(tiny / "model.safetensors", lambda _: header)
    with pytest.raises(ModelUnsupported, match=r"model.safetensors: not a safetensors file"):
        load(tiny)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": None},
        {"shape": [-1, 4]},
        {"shape": [1.5]},
        {"shape": "x"},
        {"dtype": 5},
        {"data_offsets": [-100, 156]},
        {"data_offsets": [8, 4]},
        {"data_offsets": [0]},
        {"data_offsets": ["a", "b"]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_a_damaged_entry_is_named_by_its_tensor(tiny: Path, change: dict[str, Any]) -> None:
    name = "model.norm.weight"
    with_header(tiny / "model.safetensors", lambda all_: all_ | {name: all_[name] | change})
    with pytest.raises(ModelUnsupported, match=rf"the entry of tensor '{name}' is damaged"):
        load(tiny)
    with_header(tiny / "model.safetensors", lambda all_: all_ | {name: 5})
    with pytest.raises(ModelUnsupported, match=rf"the entry of tensor '{name}' is damaged"):
        load(tiny)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2**31, 10**30, "64", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*LLAMA3, "type", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(
    max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(st.data())
def test_any_value_of_any_key_loads_or_is_refused(whole: Path, tiny: Path, data: Any) -> None:
    name = data.draw(st.sampled_from(FILES[:3]))
    content = json.loads((whole / name).read_text())
    keys = [*content, "rope_scaling", "rope_parameters", "sliding_window", "quantization_config"]
    # Another architecture is transformers' affair, and takes it seconds.
    key = data.draw(st.sampled_from([key for key in keys if key != "architectures"]))
    (tiny / name).write_text(json.dumps(content | {key: data.draw(ANYTHING)}))
    try:
        is_refused_or_loads(tiny)
    finally:
        shutil.copy(whole / name, tiny / name)


def damaged(data: bytes, random_: random.Random, within: int) -> bytes:
    """Cut short, or with a few bytes among the first ones changed."""
    if random_.random() < 0.2:
        return data[: random_.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(random_.choice([1, 1, 2, 5])):
        place = random_.randrange(min(within, len(data)))
        changed[place] = random_.choice([0, 1, 255, random_.randrange(256)])
    return bytes(changed)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_with_flipped_bytes_loads_or_is_refused(tiny: Path, name: str) -> None:
    data, random_ = (tiny / name).read_bytes(), random.Random(name)
    for _ in range(30):
        (tiny / name).unlink()
        (tiny / name).write_bytes(damaged(data, random_, 4000))
        is_refused_or_loads(tiny)


def test_a_gguf_file_with_flipped_bytes_loads_or_is_refused(tmp_path: Path) -> None:
    data = write_tiny_gguf(tmp_path / "whole.gguf", num_hidden_layers=1).read_bytes()
    random_, path = random.Random(1), tmp_path / "damaged.gguf"
    for _ in range(80):
        path.unlink(missing_ok=True)
        path.write_bytes(damaged(data, random_, 9000))
        is_refused_or_loads(path)
