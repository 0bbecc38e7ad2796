"""`dpkit check`: is this file right? Reads one file, starts nothing, imports no engine."""

from __future__ import annotations

import json

import click

from dpkit.config.load import load_config
from dpkit.errors import ConfigError


@click.command("check")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say all that is wrong with FILE (default: dpkit.toml), each with its place.

    Exits with 0 when nothing is wrong and with 2 otherwise.
    """
    try:
        config = load_config(file, overrides=overrides)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"file": file, "ok": False, "problems": error.problems}))
        raise click.exceptions.Exit(2) from None
    engines = sum(group.count for group in config.engines)
    models = list(dict.fromkeys(group.model for group in config.engines))
    policy = config.balancer.policy
    if as_json:
        facts = {"engines": engines, "models": models, "policy": policy}
        click.echo(json.dumps({"file": file, "ok": True, **facts}))
    else:
        noun = "engine" if engines == 1 else "engines"
        click.echo(f"{file}: ok: {engines} {noun} of {', '.join(models)}, policy {policy}")
