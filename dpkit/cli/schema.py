"""`dpkit schema`: the JSON Schema of a config file, for editors."""

from __future__ import annotations

import json

import click

from dpkit.config.jsonschema import json_schema


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of a config file.

    dpkit.toml names it in its first line (`#:schema …`), which editors with a TOML language server
    read. The same text is shipped as dpkit/config/dpkit.schema.json.
    """
    click.echo(json.dumps(json_schema(), indent=2))
