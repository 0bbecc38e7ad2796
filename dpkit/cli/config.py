"""`dpkit config`: what a config comes to, once all its layers are put together. Starts nothing."""

from __future__ import annotations

import json

import click

from dpkit.config.load import load_layers
from dpkit.config.rules import dotted
from dpkit.config.show import effective, origins, to_toml


@click.group("config")
def command() -> None:
    """Show what a config comes to."""


@command.command("show", short_help="Print every key, its value and its origin.")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: str, origin: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the effective config of FILE (default: dpkit.toml) as TOML, every key included.

    --set wins over the environment (DPKIT__KEY__PATH), that over FILE, FILE over what it extends,
    and that over the defaults. The output is itself a config.
    """
    loaded = load_layers(file, overrides=overrides)
    if not as_json:
        click.echo(to_toml(loaded, with_origins=origin), nl=False)
        return
    shown = {"file": file, "config": effective(loaded)}
    if origin:
        shown["origins"] = {dotted(path): at for path, at in origins(loaded).items()}
    click.echo(json.dumps(shown))
