"""The `[server]` table: addresses, keys that stay in the environment, and whether it is there."""

# ruff: noqa: N802 - a report's number is written as its list writes it

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.config.load import load_config, load_layers, parse_config
from dpkit.config.server import Address, keys_in, parse_address
from dpkit.config.show import to_toml
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = '[[engines]]\nmodel = "echo"\n'


def _complaint(server: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{MINIMAL}[server]\n{server}\n")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address(host="127.0.0.1", port=8000)),
        ("localhost:0", Address(host="localhost", port=0)),
        ("[::1]:80", Address(host="::1", port=80)),
        (":8000", Address(host="", port=8000)),
        ("unix:/run/dpkit.sock", Address(path="/run/dpkit.sock")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "8000", "localhost", "host:", "::1:80", "unix:", "a b:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert "server.listen: expected 'HOST:PORT'" in _complaint(f"listen = '{text}'")


def test_a_port_beyond_all_ports_is_refused() -> None:
    assert "a port is at most 65535, got 65536" in _complaint("listen = ':65536'")


def test_G03_two_listeners_at_one_address_are_refused_before_any_start() -> None:
    assert "server.admin_listen: '127.0.0.1:8000' is server.listen already" in _complaint(
        "admin_listen = '127.0.0.1:8000'"
    )


def test_L02_a_variable_that_is_not_set_is_a_mistake_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DPKIT_TEST_KEYS", raising=False)
    said = _complaint("api_key_env = 'DPKIT_TEST_KEYS'\nadmin_key_env = 'DPKIT_TEST_KEYS'")
    assert "<string>:4:1: server.api_key_env: the environment has no variable" in said
    assert "<string>:5:1: server.admin_key_env: the environment has no variable" in said
    monkeypatch.setenv("DPKIT_TEST_KEYS", " , ")
    assert "or it is empty" in _complaint("api_key_env = 'DPKIT_TEST_KEYS'")


def test_a_key_that_was_written_into_the_file_is_not_repeated() -> None:
    assert "sk-secret" not in _complaint("api_key_env = 'sk-secret'")


def test_a_variable_may_hold_several_keys() -> None:
    assert keys_in("K", {"K": " one, two three,"}) == ("one", "two", "three")
    assert keys_in("K", {}) == keys_in(None) == ()


def test_without_the_table_there_is_no_server_and_none_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(MINIMAL)
    assert load_config(path).server is None
    assert "server" not in to_toml(load_layers(path))
    path.write_text(f"{MINIMAL}[server]\n")
    assert load_config(path).server is not None
    assert '[server]\nlisten = "127.0.0.1:8000"' in to_toml(load_layers(path))


def test_one_key_from_outside_makes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(MINIMAL)
    config = load_config(path, overrides=["server.listen=:1"])
    assert config.server is not None
    assert config.server.listen == ":1"


def test_a_unix_socket_lies_beside_its_file(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(f"{MINIMAL}[server]\nlisten = 'unix:dpkit.sock'\n")
    config = load_config(path)
    assert config.server is not None
    assert config.server.listen == f"unix:{tmp_path}/dpkit.sock"


def test_a_key_in_the_file_itself_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("[[engines]]\nmodel = 'echo'\n[server]\napi_key_env = 'sk-12345'\n")
    said = str(caught.value)
    assert "expected the name of a variable of the environment, not the key itself" in said
    assert "sk-12345" not in said
