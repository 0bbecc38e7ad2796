"""`dpkit check`: is this file right? Reads files, starts nothing, loads no model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dpkit.config.groups import KvConfig
from dpkit.config.load import load_layers
from dpkit.config.rules import dotted
from dpkit.errors import ConfigError
from dpkit.names import EngineKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.config.load import Loaded
    from dpkit.config.rules import Path


@click.command("check")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say all that is wrong with FILE (default: dpkit.toml), each with its place.

    Exits with 0 when nothing is wrong and with 2 otherwise.
    """
    try:
        loaded = load_layers(file, overrides=overrides)
        _check_limits(loaded)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"file": file, "ok": False, "problems": error.problems}))
        raise click.exceptions.Exit(2) from None
    config = loaded.config
    engines = sum(group.count for group in config.engines)
    models = list(dict.fromkeys(group.model for group in config.engines))
    policy = config.balancer.policy
    notes = list(_idle_tables(loaded))
    if as_json:
        facts = {"engines": engines, "models": models, "policy": policy, "notes": notes}
        click.echo(json.dumps({"file": file, "ok": True, **facts}))
    else:
        noun = "engine" if engines == 1 else "engines"
        click.echo(f"{file}: ok: {engines} {noun} of {', '.join(models)}, policy {policy}")
        for note in notes:
            click.echo(f"note: {note}")


def _idle_tables(loaded: Loaded) -> Iterator[str]:
    """Tables that say nothing to the group they are in."""
    tables = loaded.layers.tables["engines"]
    for index, group in enumerate(loaded.config.engines):
        if group.kind is EngineKind.PROCESS or "process" not in tables[index]:
            continue
        path: Path = ("engines", index, "process")
        yield (
            f"{loaded.layers.source(path).at(path)}: {dotted(path)}: says nothing to engines of "
            f'kind "{group.kind}"; kind = "process" gives them processes'
        )


def _check_limits(loaded: Loaded) -> None:
    """Ask each model whether its KV cache can be as it is asked for.

    Raises:
        ConfigError: it cannot.
    """
    problems = []
    for index, group in enumerate(loaded.config.engines):
        if group.kv.memory is None and group.kv.block_size == KvConfig().block_size:
            continue  # there is room for the usual block, and most files need not wait for a model
        from dpkit.cli.facts import bad_limit  # noqa: PLC0415

        if (bad := bad_limit(group)) is not None:
            path: Path = ("engines", index, *bad.key)
            place = loaded.layers.source(path).at(path)
            problems.append(f"{place}: {dotted(path)}: {bad.message}")
    if problems:
        raise ConfigError(problems)
