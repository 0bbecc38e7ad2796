"""`dpkit fetch NAME`: puts a model into the user's cache, with a progress bar on a terminal.

Without NAME it lists what there is. Exit 0 when the model is there, 2 for an unknown name, 1 when
it could not be fetched.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from dpkit.checkpoint.catalogue import FETCHABLE
from dpkit.errors import DpkitError, ModelNotFound
from dpkit.imports import INSTALL_TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID

    from dpkit.checkpoint.fetch import Progress


@click.command("fetch", short_help="Fetch a model into the user's cache.")
@click.argument("name", required=False)
@click.option("--list", "list_names", is_flag=True, help="List what can be fetched, and stop.")
def command(name: str | None, *, list_names: bool) -> None:
    """Fetch model NAME into the user's cache, so that a config may say `model = "NAME"`.

    Without NAME, list what can be fetched.

    A second fetch finds it there. The cache is $DPKIT_CACHE, else ~/.cache/dpkit.
    """
    if list_names or name is None:
        click.echo(_listed())
        return
    try:
        _fetch(name)
    except ModelNotFound as error:
        raise click.UsageError(f"{error}\nThese can be fetched:\n{_listed()}") from error


def _listed() -> str:
    """What can be fetched, a line each."""
    return "\n".join(
        f"  {name}  {source.summary} ({source.licence}, {_megabytes(source.download)} to fetch, "
        f"{_megabytes(source.disk)} on disk)"
        for name, source in FETCHABLE.items()
    )


def _fetch(name: str) -> None:
    try:
        from dpkit.checkpoint.fetch import fetch  # noqa: PLC0415 - numpy costs `--help` too much
    except ModuleNotFoundError as error:
        raise DpkitError(f"fetching needs {error.name}; {INSTALL_TORCH}") from error
    with _progress_bar() as on_progress:
        fetched = fetch(name, on_progress=on_progress)
    state = "is already in" if fetched.already_there else "fetched into"
    click.echo(f"{name} {state} {fetched.path} ({_megabytes(fetched.size)})")


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    """One bar a stage on standard error; nothing where that is no terminal."""
    from rich.console import Console  # noqa: PLC0415 - costs `--help` too much
    from rich.progress import BarColumn, DownloadColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:12}"), BarColumn(), DownloadColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage)
            bars.update(tasks[progress.stage], completed=progress.done, total=progress.total)

        yield show


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
