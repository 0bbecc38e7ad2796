"""`dpkit run` with `[server]`: what is said, what signals do to clients, and the exit code.

Real processes, sockets and signals.
"""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

MODELS = """
import time
from dpkit.engine.models.echo import EchoModel

class Loading(EchoModel):
    inline = False
    def __init__(self):
        super().__init__()
        print("loads", flush=True)
        time.sleep(1000)

class Paced(EchoModel):
    inline = False
    def execute(self, batch, cache):
        time.sleep(0.01)
        return super().execute(batch, cache)
"""
SERVER = "[server]\nlisten = '127.0.0.1:0'\n"
ECHO = f"[[engines]]\nname = 'e'\ncount = 2\nmodel = 'echo'\n{SERVER}"
PACED = f"[[engines]]\nname = 'e'\nmodel = 'serve_models:Paced'\n{SERVER}"
ENDLESS = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 60_000, "stream": True}


@define
class Served:
    """A `dpkit run` that serves."""

    process: subprocess.Popen[str]
    said: str
    address: str

    def connect(self) -> http.client.HTTPConnection:
        """Be a client."""
        host, _, port = self.address.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=10)

    def get(self, path: str) -> tuple[int, bytes]:
        """GET, from a client of its own."""
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, path: str, **fields: Any) -> http.client.HTTPResponse:
        """POST, and wait for the head of the answer; the caller closes it."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(fields), {"connection": "close"})
        return connection.getresponse()

    def complete(self, **fields: Any) -> Any:
        """The JSON of a completion."""
        with self.post("/v1/completions", **fields) as response:
            assert response.status == 200
            return json.loads(response.read())

    def end(self, signum: int) -> tuple[int, str, str]:
        """Signal it; exit code, and what it still says."""
        self.process.send_signal(signum)
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@contextmanager
def start(tmp_path: Path, toml: str, *args: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "dpkit.toml"
    path.write_text(toml)
    (tmp_path / "serve_models.py").write_text(MODELS)
    environment = {**os.environ, **options.pop("env", {})}
    with subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", str(path), *args],
        text=True,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},  # noqa: PTH109
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(tmp_path: Path, toml: str, *args: str, **options: Any) -> Iterator[Served]:
    with start(tmp_path, toml, *args, **options) as process:
        assert process.stdout is not None
        said = ""
        while "-d " not in said and '"serving"' not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        found = re.search(r"http://([^\s/\"]+)", said)
        assert found is not None
        yield Served(process, said, found[1])


def test_it_says_where_it_serves_and_how_to_try_it(tmp_path) -> None:
    with serving(tmp_path, ECHO) as served:
        assert served.said.startswith(f"serving echo at http://{served.address}\n\ncurl ")
        command = served.said.splitlines()[-1]
        done = subprocess.run(
            ["/bin/sh", "-c", f"{command} -sS"], capture_output=True, text=True, check=False
        )
        if done.returncode != 127:
            assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "stop", done.stderr
        code, out, err = served.end(TERM)
        assert (code, err) == (0, "")
        assert "Traceback" not in out


def test_a_pipe_that_is_not_read_is_told(tmp_path) -> None:
    with serving(tmp_path, ECHO, "--log-format", "json", stdin=subprocess.PIPE) as served:
        code, _, err = served.end(TERM)
    assert code == 0
    told = json.loads(err)  # one line
    assert (told["level"], told["logger"]) == ("warning", "dpkit.cli.run")
    assert told["message"].startswith("standard input is a pipe, and not read: this file serves ")
    assert "--prompt - " in told["message"]


def test_with_json_it_says_so_in_json(tmp_path) -> None:
    with serving(tmp_path, ECHO, "--json", "--audit") as served:
        told = json.loads(served.said)["serving"]
        assert told == {"model": "echo", "addresses": [f"http://{served.address}"], "admin": []}
        served.complete(prompt="abc")
        code, out, err = served.end(TERM)
        assert (code, err) == (0, "")
        overall = json.loads(out)["statistics"]["overall"]
        assert (overall["requests"], overall["output_tokens"]) == (1, 4)


def test_a_key_is_asked_for_in_the_line_to_try(tmp_path) -> None:
    toml = f"{ECHO}api_key_env = 'SERVE_KEYS'\n"
    with serving(tmp_path, toml, env={"SERVE_KEYS": "one,two"}) as served:
        assert served.get("/v1/models")[0] == 401
        assert "one" not in served.said
        command = served.said.splitlines()[-1]
        done = subprocess.run(
            ["/bin/sh", "-c", f"{command} -sS"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SERVE_KEYS": "one,two"},
        )
        if done.returncode != 127:
            assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "stop", done.stderr


def test_F07_stopped_when_idle_it_ends_well_and_says_nothing(tmp_path) -> None:  # noqa: N802
    with serving(tmp_path, ECHO) as served:
        code, out, err = served.end(TERM)
        assert (code, out.strip(), err) == (0, "", "")


@pytest.mark.parametrize(("signum", "code"), [(TERM, 0), (INT, 130)])
def test_what_is_under_way_may_finish(tmp_path, signum, code) -> None:
    with serving(tmp_path, PACED) as served:
        with served.post("/v1/completions", **ENDLESS | {"max_tokens": 100}) as response:
            response.readline()
            served.process.send_signal(signum)
            assert response.read().endswith(b"data: [DONE]\n\n")
        out, err = served.process.communicate()
        assert (served.process.returncode, err) == (code, "")
        assert "all: 1 request, 100 tokens" in out


def test_F03_what_is_not_finished_in_time_is_told_so_and_143(tmp_path) -> None:  # noqa: N802
    grace = "[cluster]\ngrace = '1s'\nkill_after = '700ms'\n"
    with serving(tmp_path, grace + PACED) as served:
        responses = [served.post("/v1/completions", **ENDLESS) for _ in range(20)]
        served.process.send_signal(TERM)
        for response in responses:
            assert _last_event(response.read())["error"]["code"] == "draining"
            response.close()
        out, err = served.process.communicate()
        assert (served.process.returncode, err) == (143, "")
        assert "all: 20 requests, 20 failed, 0 tokens in whole answers" in out


def test_tokens_of_an_answer_that_its_client_left_are_not_in_whole_answers(tmp_path) -> None:
    with serving(tmp_path, PACED) as served:
        with served.post("/v1/completions", **ENDLESS) as response:
            response.readline()
        served.complete(prompt="abc")
        code, out, _ = served.end(TERM)
        assert code == 0
        assert "all: 2 requests, 1 aborted, 4 tokens in whole answers" in out


def test_the_second_signal_ends_streams_at_once_with_an_event(tmp_path) -> None:
    with serving(tmp_path, "[cluster]\ngrace = '1h'\nkill_after = '5s'\n" + PACED) as served:
        with served.post("/v1/completions", **ENDLESS) as response:
            response.readline()
            served.process.send_signal(TERM)
            _wait_refused(served)
            served.process.send_signal(TERM)
            error = _last_event(response.read())["error"]
            assert (error["type"], error["code"]) == ("server_error", "shutdown")
            assert "the server is stopping: the answer was cut off after " in error["message"]
        _, err = served.process.communicate()
        assert (served.process.returncode, err) == (143, "")


def _last_event(body: bytes) -> Any:
    *_, last = body.decode().strip().split("\n\n")
    return json.loads(last.removeprefix("data: "))


def _wait_refused(served: Served) -> None:
    """Until the listener is closed."""
    with suppress(ConnectionError):
        while True:
            with closing(served.connect()) as connection:
                connection.connect()


@pytest.mark.parametrize("grace", ["0s", "1ms"])
def test_with_hardly_any_time_to_finish_it_ends_well_if_nothing_is_under_way(
    tmp_path, grace
) -> None:
    with serving(tmp_path, f"[cluster]\ngrace = '{grace}'\n{ECHO}") as served:
        served.complete(prompt="hi")
        code, out, err = served.end(TERM)
        assert (code, err) == (0, "")
        assert "all: 1 request" in out


def test_clients_are_told_of_the_end_before_a_table_is_made(tmp_path) -> None:
    """Which takes a while: here until the process ends."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import time\ntime.sleep(1000)\n")
    with serving(tmp_path, "[cluster]\ngrace = '1h'\nkill_after = '2s'\n" + PACED) as served:
        served.complete(prompt="hi")  # or there would be nothing to report
        with served.post("/v1/completions", **ENDLESS) as response:
            response.readline()
            served.process.send_signal(TERM)
            _wait_refused(served)
            served.process.send_signal(TERM)
            assert _last_event(response.read())["error"]["code"] == "shutdown"
        assert served.process.wait() == 143


def test_until_pre_stop_is_over_it_is_not_ready_and_takes_requests(tmp_path) -> None:
    toml = "[cluster]\ngrace = '20s'\npre_stop = '2s'\n" + ECHO
    with serving(tmp_path, toml) as served:
        assert served.get("/ready")[0] == 200
        served.process.send_signal(TERM)
        while served.get("/ready")[0] == 200:
            pass
        assert served.get("/health")[0] == 200
        assert served.complete(prompt="late")["choices"][0]["text"] == "late"
        _wait_refused(served)
        assert served.process.wait() == 0


def test_while_a_model_loads_probes_are_answered_and_a_signal_ends_it(tmp_path) -> None:
    address = _free_address()
    toml = PACED.replace("Paced", "Loading").replace("127.0.0.1:0", address)
    with start(tmp_path, toml) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loads\n"
        served = Served(process, "", address)
        assert served.get("/health") == (200, b"")
        assert b'dpkit:server_state{state="starting"} 1.0' in served.get("/metrics")[1]
        assert served.get("/ready")[0] == 503
        with served.post("/v1/completions", prompt="a") as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert json.loads(response.read())["error"]["code"] == "starting"
        while process.poll() is None:  # two that come at once may be one
            process.send_signal(TERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert process.returncode == 130


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("where", ["listen", "admin_listen"])
def test_a_port_in_use_is_said_before_any_engine_starts(tmp_path, where) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        toml = PACED.replace("Paced", "Loading").replace(SERVER, "[server]\nlisten = ':0'\n")
        toml = toml.replace("listen = ':0'\n", "" if where == "listen" else "listen = ':0'\n")
        with start(tmp_path, f"{toml}{where} = '{address}'\n") as process:
            out, err = process.communicate()
        assert (process.returncode, out) == (3, "")
        assert err == (
            f"error: cannot listen at {address}: Address already in use; "
            "stop what listens there, or choose another port\n"
        )


def test_prompts_are_answered_on_the_terminal_all_the_same(tmp_path) -> None:
    with start(tmp_path, ECHO, "--prompt", "hello") as process:
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert "hello [stop]" in out
        assert "serving" not in out


def test_prompts_come_from_standard_input_if_that_is_asked_for_or_it_is_a_file(tmp_path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("one\ntwo\n")
    path = tmp_path / "dpkit.toml"
    path.write_text(ECHO)
    command = [sys.executable, "-m", "dpkit", "run", str(path)]
    with prompts.open() as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True)
    assert "two [stop]" in done.stdout
    done = subprocess.run(
        [*command, "--prompt", "-"], input="three\n", capture_output=True, text=True, check=True
    )
    assert "three [stop]" in done.stdout
    done = subprocess.run(
        [*command, "--prompt", "-", "--prompt", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2


@pytest.mark.parametrize("option", ["--chat", "--max-tokens=3", "--temperature=1"])
def test_options_of_prompts_are_refused_where_nothing_would_obey_them(tmp_path, option) -> None:
    with start(tmp_path, ECHO, option) as process:
        _, err = process.communicate()
        assert process.returncode == 2
        assert f"{option.partition('=')[0]} is for prompts" in err


def test_sighup_and_an_admin_reload_the_file(tmp_path) -> None:
    toml = f"{ECHO}admin_listen = '127.0.0.1:0'\n"
    with serving(tmp_path, toml, "--json") as served:
        admin = json.loads(served.said)["serving"]["admin"][0].removeprefix("http://")
        served_to_admin = Served(served.process, "", admin)
        path = tmp_path / "dpkit.toml"
        path.write_text(toml.replace("count = 2", "count = 3"))
        with served_to_admin.post("/admin/reload") as response:
            assert json.loads(response.read()) == {"changes": ["engines.e: 2 → 3 engines"]}
        path.write_text(toml.replace("count", "cuont"))
        with served_to_admin.post("/admin/reload") as response:
            assert response.status == 400
            assert "did you mean 'count'?" in json.loads(response.read())["error"]["message"]
        path.write_text(toml.replace("[server]", "[server]\nmax_connections = 9"))
        with served_to_admin.post("/admin/reload") as response:
            assert response.status == 400
            assert "server: cannot change" in json.loads(response.read())["error"]["message"]
        path.write_text(toml)
        served.process.send_signal(HUP)
        assert served.process.stderr is not None
        assert "3 → 2 engines" in served.process.stderr.readline()
        assert len(json.loads(served.get("/ready")[1])["engines"]) == 2


def test_engines_in_processes_are_served_alike(tmp_path) -> None:
    toml = ECHO.replace("model = 'echo'", "model = 'echo'\nkind = 'process'")
    with serving(tmp_path, toml) as served:
        assert served.complete(prompt="abc")["choices"][0]["text"] == "abc"
        code, _, err = served.end(TERM)
        assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("module", "more", "who", "extra"),
    [
        ("httptools", "", "[server]", "serve"),
        (
            "opentelemetry",
            "otlp_traces_endpoint = 'http://localhost:4318/v1/traces'\n",
            "server.otlp_traces_endpoint",
            "otel",
        ),
    ],
)
def test_without_what_an_extra_brings_it_says_how_to_get_it(
    tmp_path, module, more, who, extra
) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(ECHO + more)
    code = (
        f"import sys; sys.modules[{module!r}] = None; from dpkit.cli.main import main; "
        "sys.exit(main(['run', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: {who} needs {module}")
    assert done.stderr.endswith(f"; `pip install 'dpkit[{extra}]'` brings it\n")


def test_metrics_are_told_by_the_name_that_clients_use(tmp_path) -> None:
    with serving(tmp_path, ECHO + "model_name = 'mine'\n") as served:
        served.complete(prompt="ab")
        status, text = served.get("/metrics")
        assert status == 200
        assert b'vllm:prompt_tokens_total{engine="0",model_name="mine"} ' in text
        assert b'dpkit:server_state{state="ready"} 1.0' in text
        total = (
            'vllm:request_success_total{engine="%s",finished_reason="stop",model_name="mine"} 1.0'
        )
        assert any((total % rank).encode() in text for rank in "01")
        assert served.end(TERM)[0] == 0


def test_a_terminal_that_is_closed_ends_it_as_sigterm_does(tmp_path: Path) -> None:
    (tmp_path / "dpkit.toml").write_text(ECHO)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, "run", str(tmp_path / "dpkit.toml")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,  # or else it could have no terminal of its own
    ) as process:
        os.close(theirs)
        seen = b""
        while b"http://" not in seen:
            seen += os.read(ours, 1000)
        process.send_signal(HUP)
        while b"is in force" not in seen:
            seen += os.read(ours, 1000)
        os.close(ours)
        try:
            assert process.wait(30) == 0, "all that was asked is answered, as after SIGTERM"
        finally:
            process.kill()


IN_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from dpkit.cli.main import main
sys.exit(main())
"""
