"""``python -m dpkit.testing.world --seed N``: a whole cluster through its troubles, from one seed.

The real cluster, with nothing but its models, its clock and its stats line simulated. The seed
gives the trace, the plan of what goes wrong (`dpkit.testing.plan`), and the schedule; the run gives
a history, which the one checker judges. Prints a hash of each history: equal in every process. Exit
0: all promises were kept; 1: one was not, and a line says which seed to run again.
"""

from __future__ import annotations

import logging
import sys

import click

from dpkit.testing.plan import draw_plan
from dpkit.testing.stage import WorldFailed, WorldResult, run_world

__all__ = ["WorldFailed", "WorldResult", "draw_plan", "main", "run_world"]


def _seeds(_context: object, _parameter: object, text: str | None) -> range:
    """Read ``A..B``, both ends included."""
    if text is None:
        return range(0)
    first, dots, last = text.partition("..")
    try:
        return range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form A..B") from None


@click.command()
@click.option("--seed", type=int, help="Run this world.")
@click.option("--seeds", callback=_seeds, metavar="A..B", help="Run all of these, both included.")
@click.option("--plan", "show", is_flag=True, help="Show what goes wrong when, first.")
def main(seed: int | None, seeds: range, *, show: bool) -> None:
    """Run whole clusters through troubles drawn from seeds, and judge their histories."""
    # What a world's troubles make dpkit warn of was put in on purpose.
    logging.getLogger("dpkit").addHandler(logging.NullHandler())
    if seed is None and not seeds:
        raise click.UsageError("give --seed N or --seeds A..B")
    for each in seeds if seed is None else [seed]:
        plan = draw_plan(each)
        if show:
            click.echo(plan)
        try:
            click.echo(run_world(plan))
        except WorldFailed as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
