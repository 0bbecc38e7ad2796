"""vLLM's real frontend over dpkit's engines: text, streams, stops, aborts, load, and ends."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.harness import MODEL, open_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.peers.conftest import Serve
    from tests.peers.harness import Served

pytestmark = [pytest.mark.peer, pytest.mark.timeout(120)]

ECHO = '[[engines]]\nname = "echo"\ncount = 2\nmodel = "echo"\n'
PACED = '[[engines]]\nname = "paced"\ncount = 2\nmodel = "cost:h100-8b"\n'
SMOL = '[[engines]]\nname = "smol"\ncount = 2\nmodel = "smollm2-135m"\n'

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_engines.py"


@pytest.fixture(scope="module")
def echo(serve: Serve, byte_model: Path) -> Iterator[Served]:
    with serve(ECHO, byte_model) as served:
        yield served


@pytest.fixture(scope="module")
def paced(serve: Serve, byte_model: Path) -> Iterator[Served]:
    """Engines whose steps take as long as a GPU's."""
    with serve(PACED, byte_model) as served:
        yield served


@pytest.fixture(scope="module")
def smol(serve: Serve, demo_path: Path) -> Iterator[Served]:
    with serve(SMOL, demo_path) as served:
        yield served


def choice(answer: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer."""
    (only,) = answer["choices"]
    assert isinstance(only, dict)
    return only


def texts(events: Iterator[dict[str, Any]]) -> str:
    """What a streamed completion says in all."""
    return "".join(each["text"] for event in events for each in event["choices"])


# --- echo: each text is known beforehand


def test_a_completion_is_the_models_own_text_to_its_end(echo: Served) -> None:
    answer = echo.complete("Zwölf Boxkämpfer", max_tokens=64)
    assert choice(answer)["text"] == "Zwölf Boxkämpfer"
    assert choice(answer)["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("Zwölf Boxkämpfer".encode()) + 1


def test_max_tokens_ends_a_completion(echo: Served) -> None:
    only = choice(echo.complete("abcdef", max_tokens=3))
    assert (only["text"], only["finish_reason"]) == ("abc", "length")


def test_a_prompt_may_be_token_ids_and_its_end_ignored(echo: Served) -> None:
    only = choice(echo.complete([97, 98], max_tokens=5, ignore_eos=True))
    assert (only["text"], only["finish_reason"]) == ("ababa", "length")


def test_a_stop_string_ends_it_and_frees_the_engine(echo: Served) -> None:
    """The frontend finds it, and sends an abort: stop strings never reach an engine."""
    only = choice(echo.complete("one two three", max_tokens=500, stop=["two"], ignore_eos=True))
    assert (only["text"], only["finish_reason"]) == ("one ", "stop")
    assert only["stop_reason"] == "two"
    assert echo.coordinator is not None
    echo.coordinator.wait_idle()


def test_a_stop_token_is_named(echo: Served) -> None:
    only = choice(echo.complete("abc", max_tokens=9, stop_token_ids=[98]))
    assert (only["finish_reason"], only["stop_reason"]) == ("stop", 98)


def test_a_chat_is_answered(echo: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    status, answer = echo.post(
        "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 50}
    )
    assert status == 200
    assert choice(answer)["message"]["content"] == "hello"


def test_a_stream_brings_all_of_it(echo: Served) -> None:
    with echo.stream("/v1/completions", {"prompt": "piece by piece", "max_tokens": 50}) as events:
        assert texts(events) == "piece by piece"


def test_logprobs_are_told_for_output_and_prompt(echo: Served) -> None:
    only = choice(echo.complete("abc", max_tokens=2, logprobs=2, prompt_logprobs=1))
    assert only["logprobs"]["tokens"] == ["a", "b"]
    assert only["logprobs"]["token_logprobs"] == [0.0, 0.0]
    told = [next(iter(each.values()))["decoded_token"] for each in only["prompt_logprobs"][1:]]
    assert told == ["b", "c"]


def test_what_the_engine_refuses_is_the_callers_mistake(echo: Served) -> None:
    status, answer = echo.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "abc", "max_tokens": 2, "repetition_penalty": 1000.0},
    )
    assert status == 400, answer
    assert "repetition_penalty must be a number from 0.01 to 100" in answer["error"]["message"]
    assert echo.complete("still here", max_tokens=99)["choices"][0]["text"] == "still here"


def test_utility_calls_are_answered(echo: Served) -> None:
    assert echo.get("/is_sleeping") == (200, '{"is_sleeping":false}')
    assert echo.get("/is_paused") == (200, '{"is_paused":false}')
    assert echo.post("/pause?mode=abort")[0] == 200
    assert echo.get("/is_paused") == (200, '{"is_paused":true}')
    status, answer = echo.post("/v1/completions", {"model": MODEL, "prompt": "a"})
    assert status == 503, answer
    assert echo.post("/resume")[0] == 200
    assert echo.post("/reset_prefix_cache")[0] == 200
    assert echo.post("/sleep?level=1")[0] == 500  # a dpkit engine does not, and says so
    assert echo.complete("awake", max_tokens=99)["choices"][0]["text"] == "awake"


def test_the_frontend_is_told_both_engines_and_uses_them(echo: Served) -> None:
    assert echo.get("/version")[0] == 200
    assert len(echo.ready) == 2
    with ThreadPoolExecutor(8) as pool:
        asked = [f"request {number}" for number in range(64)]
        answers = pool.map(lambda text: echo.complete(text, max_tokens=99), asked)
        assert [choice(answer)["text"] for answer in answers] == asked
    assert echo.coordinator is not None
    echo.coordinator.wait_idle()
    assert {rank for _, rank, running, _ in echo.coordinator.heard if running} == {0, 1}


# --- aborts, by engines that take their time


def hang_up(served: Served, prompt: str) -> float:
    """Leave in the middle of a stream; the moment of it."""
    body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True}
    with served.stream("/v1/completions", body) as events:
        next(events)
        next(events)
        return time.monotonic()


def freed_after(served: Served, prompt: str, clients: int) -> float:
    """Seconds from the last client's leaving to the engines' word that they hold nothing.

    The best of three: it is the engine that is to be quick, and this machine may be busy.
    """
    assert served.coordinator is not None
    times = []
    for _ in range(3):
        with ThreadPoolExecutor(clients) as pool:
            left = max(pool.map(lambda _: hang_up(served, prompt), range(clients)))
        times.append(served.coordinator.wait_idle(after=left) - left)
    return min(times)


@pytest.mark.parametrize("clients", [1, 8])
def test_engines_are_free_within_100_ms_of_clients_that_hang_up(
    paced: Served, clients: int
) -> None:
    assert freed_after(paced, "never ends", clients) < 0.1


def test_sigterm_of_an_engine_ends_its_requests_as_aborted(serve: Serve, byte_model: Path) -> None:
    with serve(PACED, byte_model) as served:
        body = {"prompt": "never ends", "max_tokens": 50_000, "ignore_eos": True}
        with served.stream("/v1/completions", body) as events:
            next(events)
            assert served.coordinator is not None
            rank = served.coordinator.wait_busy()
            served.engines[rank].send_signal(signal.SIGTERM)
            *_, last = events
            assert choice(last)["finish_reason"] == "abort"
        assert served.engines[rank].wait(10) == 0
        assert served.get("/health")[0] == 200


# --- load


def bench(vllm_rs: Path, served: Served, model: Path, *, read: int, said: int) -> str:
    """What `vllm-rs bench serve` reports."""
    return subprocess.run(
        [
            *(str(vllm_rs), "bench", "serve", "--host", "127.0.0.1", "--port", str(served.port)),
            *("--model", MODEL, "--tokenizer", str(model), "--dataset-name", "random"),
            *("--random-input-len", str(read), "--random-output-len", str(said)),
            *("--num-prompts", "400", "--max-concurrency", "32", "--prompt-token-ids"),
            *("--ignore-eos", "--disable-tqdm", "--no-steady-state"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def all_succeeded(report: str, said: int) -> bool:
    """Whether no request failed and no token is missing."""
    figures = {}
    for line in report.splitlines():
        name, colon, figure = line.partition(":")
        if colon:
            figures[name.strip()] = figure.strip()
    return (
        figures["Successful requests"] == "400"
        and figures["Failed requests"] == "0"
        and figures["Total generated tokens"] == str(400 * said)
    )


def test_400_of_400_requests_of_a_load_generator_succeed(
    vllm_rs: Path, echo: Served, byte_model: Path
) -> None:
    report = bench(vllm_rs, echo, byte_model, read=16, said=20)
    assert all_succeeded(report, 20), report


@pytest.mark.model
@pytest.mark.parametrize(
    ("read", "said"),
    [(4, 2), pytest.param(16, 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_400_of_400_requests_succeed_with_a_real_model(
    vllm_rs: Path, smol: Served, demo_path: Path, read: int, said: int
) -> None:
    report = bench(vllm_rs, smol, demo_path, read=read, said=said)
    assert all_succeeded(report, said), report
    assert smol.coordinator is not None
    smol.coordinator.wait_idle()


# --- a real model


@pytest.mark.model
def test_a_real_model_knows_paris(smol: Served) -> None:
    only = choice(smol.complete("The capital of France is", max_tokens=4, temperature=0))
    assert only["text"].startswith(" Paris")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "max_tokens": 30, "temperature": 0}
    with smol.stream("/v1/chat/completions", body) as events:
        said = [choice(event)["delta"].get("content") or "" for event in events]
    assert "".join(said) == "The capital of France is Paris."
    only = choice(smol.complete("1, 2, 3, 4, 5, 6,", max_tokens=40, temperature=0, stop=["9"]))
    assert (only["text"], only["stop_reason"]) == (" 7, 8, ", "9")


@pytest.mark.model
def test_a_real_models_engine_is_free_soon_after_a_client_hangs_up(smol: Served) -> None:
    # A step under way is not cut short, and takes as long as a busy machine makes it.
    assert freed_after(smol, "Once upon a time", 1) < 0.5


# --- the frontend owns the handshake, and starts the engines


def test_vllm_rs_serve_brings_dpkits_engines_up_and_down(
    vllm_rs: Path, byte_model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    config = tmp_path / "dpkit.toml"
    config.write_text(ECHO)
    told = environment | {"DPKIT_CONFIG": str(config)}
    with open_server(vllm_rs, byte_model, EXAMPLE, tmp_path, environment=told) as served:
        assert choice(served.complete("over Unix sockets", max_tokens=99))["text"] == (
            "over Unix sockets"
        )
    assert "managed engine shut down gracefully" in served.log.read_text()
