"""Real clients, unmodified, against `dpkit run` with the demo model in two processes.

curl, OpenAI's own client, the `llm` command line and vLLM's load generator ask for what they ask
any server for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peer, pytest.mark.model, pytest.mark.timeout(120)]

SMOL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CONFIG = f"""
[[engines]]
name = "smol"
model = "{SMOL}"
kind = "process"
count = 2

[server]
listen = "127.0.0.1:0"
"""


@contextmanager
def _serving(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    config = folder / "dpkit.toml"
    config.write_text(CONFIG)
    with subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", str(config), "--json", "--audit"],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        [url] = json.loads(process.stdout.readline())["serving"]["addresses"]
        try:
            yield url
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(
    demo_path: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[str]:
    """Where the demo model is served. When it is stopped, nothing may be left of any request."""
    assert demo_path.is_dir()
    with _serving(tmp_path_factory.mktemp("served"), environment) as address:
        yield address


def _run(*command: str, **environment: str) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    ).stdout


def _program(name: str) -> str:
    """A program of this interpreter's environment, or of the system's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name.upper()} IS NOT HERE: `pip install 'dpkit[dev]'` brings it, but curl")
    return found


def test_curl(url: str) -> None:
    curl = _program("curl")
    assert _run(curl, "-fsS", f"{url}/health") == ""
    assert f'"id":"{SMOL}"' in _run(curl, "-fsS", f"{url}/v1/models")
    body = {
        "model": SMOL,
        "messages": FRANCE,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = f"{url}/v1/chat/completions"
    *pieces, usage, done, _ = _run(curl, "-fsSN", chat, "-d", json.dumps(body)).split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["choices"] == []
    said = [json.loads(piece.removeprefix("data: "))["choices"][0] for piece in pieces]
    text = "".join(choice["delta"]["content"] for choice in said)
    assert text == "The capital of France is Paris."
    assert said[-1]["finish_reason"] == "stop"


def test_openais_client(url: str) -> None:
    openai = pytest.importorskip("openai", reason="pip install 'dpkit[dev]' brings it")
    messages: Any = FRANCE
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        told = client.chat.completions.create(
            model=SMOL, messages=messages, temperature=0, logprobs=True, top_logprobs=2
        )
        said = told.choices[0].message.content
        assert said == "The capital of France is Paris."
        tokens = [entry.token for entry in told.choices[0].logprobs.content]
        assert "".join(tokens[:-1]) == said
        assert tokens[-1].startswith("token_id:")  # the end, which has no text
        assert tokens[1] == " capital"
        greedy: Any = {"model": SMOL, "temperature": 0, "max_tokens": 8}
        whole = client.completions.create(prompt=["1, 2, 3,", "A, B, C,"], **greedy)
        pieces = client.completions.create(prompt=["1, 2, 3,", "A, B, C,"], stream=True, **greedy)
        texts = ["", ""]
        for piece in pieces:
            texts[piece.choices[0].index] += piece.choices[0].text
        assert texts == [choice.text for choice in whole.choices]
        assert texts[0].startswith(" 4, 5")


def test_echo_and_logprobs_tell_which_of_two_goes_on_better(url: str) -> None:
    openai = pytest.importorskip("openai", reason="pip install 'dpkit[dev]' brings it")
    texts = ["The capital of France is Paris", "The capital of France is Berlin"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        told = client.completions.create(
            model=SMOL, prompt=texts, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        scores = []
        for choice, text in zip(told.choices, texts, strict=True):
            assert choice.text.startswith(text)
            logprobs = choice.logprobs
            assert "".join(logprobs.tokens[:-1]) == text
            assert logprobs.token_logprobs[0] is None
            scores.append(sum(logprobs.token_logprobs[1:-1]))
            pairs = zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
            assert all(token <= max(top.values()) for token, top in [*pairs][1:])
        assert scores[0] > scores[1]


def test_the_llm_command_line(url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: {SMOL}\n  model_name: {SMOL}\n  api_base: {url}/v1\n"
    )
    command = [_program("llm"), "-m", SMOL, FRANCE[0]["content"], "-o", "temperature", "0"]
    said = _run(*command, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="x")
    assert said.strip() == "The capital of France is Paris."


def test_vllms_load_generator(url: str, vllm_rs: Path, demo_path: Path, tmp_path: Path) -> None:
    _run(
        *(str(vllm_rs), "bench", "serve", "--base-url", url, "--model", SMOL),
        *("--tokenizer", str(demo_path), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "16", "--random-output-len", "4"),
        *("--num-prompts", "40", "--max-concurrency", "8"),
        *("--save-result", "--result-dir", str(tmp_path), "--disable-tqdm"),
    )
    [path] = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"]) == (40, 0)
    assert report["total_output_tokens"] == 160
