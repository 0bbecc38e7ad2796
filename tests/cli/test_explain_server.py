"""`dpkit explain` of `[server]`: who can reach it, and what is asked of them."""

from __future__ import annotations

import pytest

from dpkit.cli.served import serving
from dpkit.config.load import parse_config


def _words(server: str) -> str:
    return "\n".join(serving(parse_config(f"[[engines]]\nmodel = 'echo'\n{server}")))


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_KEY", "secret")
    monkeypatch.setenv("TWO_KEYS", "secret, hidden")


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("", "It is not served over HTTP: `dpkit run` answers prompts."),
        ("[server]", "at 127.0.0.1:8000, for this machine alone. Clients call the model echo."),
        ("[server]\nlisten = '[::1]:80'", "for this machine alone"),
        ("[server]\nlisten = ':80'", "for everybody who can reach this machine"),
        ("[server]\nlisten = '10.0.0.7:80'", "for everybody who can reach that address"),
        ("[server]\nlisten = 'unix:/run/d'", "at unix:/run/d, a Unix socket"),
        ("[server]\nmodel_name = 'gpt'", "Clients call the model gpt."),
        ("[server]", "No key is asked for."),
        ("[server]\napi_key_env = 'ONE_KEY'", "must bring a key, from the variable ONE_KEY"),
        ("[server]\napi_key_env = 'TWO_KEYS'", "must bring one of 2 keys, from"),
        ("[server]", "Drain, scale and reload are not to be had over HTTP."),
        ("[server]\nadmin_key_env = 'ONE_KEY'", "to be had there too, with a key from"),
        ("[server]\nadmin_listen = ':1'", "to be had at :1, for everybody who can reach this"),
        (
            "[server]\nadmin_listen = '127.0.0.1:1'\nadmin_key_env = 'ONE_KEY'",
            "to be had at 127.0.0.1:1, for this machine alone, with a key from",
        ),
        (
            "[server]\notlp_traces_endpoint = 'http://c:4318/v1/traces'",
            "A span for each request for text goes to http://c:4318/v1/traces.",
        ),
        ("[server]\nmax_body = '1MiB'", "a request has at most 1MiB"),
    ],
)
def test_it_says_where_for_whom_and_how_much(server: str, says: str) -> None:
    words = _words(server)
    assert says in words
    assert "secret" not in words
