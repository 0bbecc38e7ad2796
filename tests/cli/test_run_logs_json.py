"""`dpkit run --log-format json`: one object an event, each with its request and its engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.test_run_serves import ECHO, HUP, SERVER, serving

if TYPE_CHECKING:
    from pathlib import Path

SECRETS = ("sesame-of-the-api", "what-nobody-shall-read")
MODELS = """
import logging
from dpkit.engine.models.echo import EchoModel

class Talks(EchoModel):
    inline = False
    lives = 0
    def execute(self, batch, cache):
        logging.getLogger("mine").warning("a step of mine")
        return super().execute(batch, cache)

class Fails(EchoModel):
    def execute(self, batch, cache):
        raise ZeroDivisionError("the GPU is on fire")
"""


def records(err: str) -> list[dict[str, Any]]:
    """All of standard error, which has nothing but objects."""
    return [json.loads(line) for line in err.splitlines()]


def only(told: list[dict[str, Any]], logger: str) -> dict[str, Any]:
    [found] = [each for each in told if each["logger"] == logger]
    return found


def test_each_request_has_a_line_that_says_who_answered(tmp_path: Path) -> None:
    options = ("--log-format", "json", "--set", "log.level=info")
    with serving(tmp_path, ECHO, *options) as served:
        connection = served.connect()
        body = json.dumps({"prompt": SECRETS[1], "max_tokens": 2})
        headers = {"X-Request-Id": "mine", "X-data-parallel-rank": "1"}
        connection.request("POST", "/v1/completions?key=x", body, headers)
        assert connection.getresponse().read()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b""
        connection.close()
        code, _, err = served.end(signal.SIGTERM)
    assert code == 0
    first, second = (each for each in records(err) if each["logger"] == "dpkit.serve.access")
    assert (first["request_id"], first["engine"], first["status"]) == ("mine", "e-1", 200)
    assert (first["method"], first["path"]) == ("POST", "/v1/completions")
    assert first["ending"] == "finished"
    assert first["bytes"] > 100
    assert first["seconds"] > 0
    assert (second["path"], second["engine"]) == ("/health", None)
    ready = [each for each in records(err) if each["message"].startswith("engine ready")]
    assert {each["engine"] for each in ready} == {"e-0", "e-1"}


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_are_logged_if_asked_and_secrets_never(tmp_path: Path, prompts: bool) -> None:
    key, prompt = SECRETS
    toml = f"{ECHO}api_key_env = 'SERVE_KEYS'\n[log]\nlevel = 'debug'\nformat = 'json'\n"
    toml += "prompts = true\n" * prompts
    with serving(tmp_path, toml, env={"SERVE_KEYS": key}) as served:
        connection = served.connect()
        sound: dict[str, Any] = {"prompt": prompt, "max_tokens": 60}
        for path, body, status in (
            ("/v1/completions", sound, 200),
            ("/v1/completions", sound | {"stream": True}, 200),
            ("/v1/completions", sound | {"timeout": 1e-9}, 504),
            ("/v1/completions", {"prompt": {"a": prompt}}, 400),
            ("/v1/completions", {"prompt": prompt * 9000}, 400),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}, 200),
            ("/tokenize", {"prompt": prompt}, 200),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            assert response.read()
            assert response.status == status
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {prompt}"})
        assert connection.getresponse().status == 401
        connection.close()
        _, _, err = served.end(signal.SIGTERM)
    assert key not in err
    asked = [each for each in records(err) if each["logger"] == "dpkit.serve.bodies"]
    if prompts:
        assert json.dumps(sound) in asked[0]["message"]
        assert asked[0]["engine"] in {"e-0", "e-1"}
    else:
        assert not asked
        assert prompt not in err


def test_what_a_model_logs_is_about_its_engine_here_and_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "log_models.py").write_text(MODELS)
    for kind in ("local", "process"):
        toml = f"[[engines]]\nname = 'e'\nmodel = 'log_models:Talks'\nkind = '{kind}'\n{SERVER}"
        with serving(tmp_path, toml, "--log-format", "json") as served:
            served.complete(prompt="a", max_tokens=1)
            _, _, err = served.end(signal.SIGTERM)
        [told] = records(err)
        assert told["message"].endswith("a step of mine")
        assert (told["level"], told["engine"]) == ("warning", "e-0")


def test_a_process_that_fails_is_told_in_one_object_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "log_models.py").write_text(MODELS)
    (tmp_path / "dpkit.toml").write_text(
        "[[engines]]\nname = 'e'\nmodel = 'log_models:Fails'\nkind = 'process'\n"
        "supervision = {intensity = 0}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "dpkit", "run", "--log-format", "json", "--prompt", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("{")]
    told = records("\n".join(said))
    assert all(each["engine"] for each in told), told
    first = told[0]
    assert first["message"] == "dpkit.launch.child: engine e-0 failed"
    assert first["traceback"].endswith("the GPU is on fire\nin engine e-0, step 1")
    assert not any("Traceback" in each["message"] for each in told)


def test_a_reload_may_change_the_form_unless_the_command_line_has_it(tmp_path: Path) -> None:
    for options, is_json in (((), True), (("--log-format", "text"), False)):
        with serving(tmp_path, ECHO, *options) as served:
            (tmp_path / "dpkit.toml").write_text(f"{ECHO}[log]\nformat = 'json'\n")
            served.process.send_signal(HUP)
            assert served.process.stderr is not None
            assert served.process.stderr.readline().startswith("{") == is_json
            served.end(signal.SIGTERM)
