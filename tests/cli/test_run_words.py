"""What `dpkit run` says of a command line, or of what is missing, before it starts anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from dpkit.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

SERVES = "[[engines]]\nmodel = 'echo'\n[server]\nlisten = '127.0.0.1:0'\n"
TRACED = f"{SERVES}otlp_traces_endpoint = 'http://127.0.0.1:1/v1/traces'\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "dpkit.toml").write_text(SERVES)
    return str(tmp_path / "dpkit.toml")


def test_standard_input_is_all_or_nothing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--prompt", "-", "--prompt", "x"]) == 2
    said = "--prompt - is all of standard input; give no other --prompt"
    assert said in capsys.readouterr().err


def test_options_of_prompts_are_not_for_servers(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", file, "--chat"]) == 2
    said = "--chat is for prompts, and this file serves HTTP ([server]); give --prompt, or leave it"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("toml", "module", "says"),
    [
        (SERVES, "dpkit.cli.serving", "[server] needs dpkit.cli.serving; `pip install 'dpkit[ser"),
        (
            TRACED,
            "dpkit.serve.tracing",
            "server.otlp_traces_endpoint needs dpkit.serve.tracing; `pip install 'dpkit[otel]'`",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    toml: str,
    module: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "dpkit.toml").write_text(toml)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["run", str(tmp_path / "dpkit.toml")]) == 3
    assert says in capsys.readouterr().err
