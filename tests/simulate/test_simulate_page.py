"""What docs/simulate.md says of options, workloads and keys is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from attrs import fields

from dpkit.cli.fit import command as fit
from dpkit.cli.plan import command as plan
from dpkit.cli.simulate import command as simulate
from dpkit.simulate.measures import Result
from dpkit.simulate.workloads import WORKLOADS

PAGE = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()


@pytest.mark.parametrize("command", [simulate, plan, fit])
def test_every_option_is_on_the_page(command: click.Command) -> None:
    options = [each.opts[0] for each in command.params if isinstance(each, click.Option)]
    hidden = {"--most", "--rows", "--clients", "--seed", "--set"} if command is plan else set()
    assert [each for each in options if each not in PAGE and each not in hidden] == []


def test_every_workload_is_on_the_page_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z]+\d*|micro-[a-z]+)` \| ", PAGE, re.MULTILINE)
    assert [row for row in rows if row in WORKLOADS] == list(WORKLOADS)


def test_every_measure_is_on_the_page() -> None:
    measures = [each.name for each in fields(Result)]
    listing = PAGE.partition('{"results": [{')[2].partition("}")[0]
    assert re.findall(r'"([a-z0-9_]+)"', listing) == measures


def test_the_command_of_the_page_has_options_that_exist() -> None:
    commands = re.findall(r"^dpkit simulate .*?[^\\]$", PAGE, re.MULTILINE | re.DOTALL)
    known = {opt for each in simulate.params for opt in each.opts}
    used = {word for command in commands for word in command.split() if word.startswith("--")}
    assert used
    assert used <= known
