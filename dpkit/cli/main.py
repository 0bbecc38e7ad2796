"""`dpkit`: finds the command, runs it, and turns what went wrong into a message and an exit code.

Commands are imported when they are used and no earlier: `dpkit --help` and `dpkit check` import
neither Trio nor torch, which would cost more time than all the rest of them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import TYPE_CHECKING

import click

from dpkit.errors import (
    ClusterNotStarted,
    ConfigError,
    DpkitError,
    LaunchFailed,
    ModelNotFound,
    ModelUnsupported,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Name, and what `dpkit --help` says of it. The module is `dpkit.cli.NAME`.
_COMMANDS = {
    "run": "Bring a cluster up and serve HTTP, or answer prompts.",
    "engine": "Be one engine, for frontends that speak vLLM's wire.",
    "coordinator": "Tell frontends the load of engines that speak vLLM's wire.",
    "bench": "Put load on a server, or on a cluster, and say how it did.",
    "check": "Say all that is wrong with a config; start nothing.",
    "explain": "Say in plain words what a config does; start nothing.",
    "config": "Show what a config comes to.",
    "simulate": "Replay a trace on a virtual clock, under one policy or several.",
    "plan": "Say how many engines a trace needs.",
    "fit": "Fit the cost of a step to what was measured.",
    "schema": "Print the JSON Schema of a config file.",
    "fetch": "Put a model into the cache.",
}

_PLACE = re.compile(r"(?!--).+?:\d+(:\d+)?: ")

FAILED, USAGE, NOT_STARTED, INTERRUPTED = 1, 2, 3, 130

_NO_START = (ClusterNotStarted, LaunchFailed, ModelNotFound, ModelUnsupported)
"""What is raised before there is a cluster; one that runs says in words of its own what failed."""


class _LazyGroup(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's own
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"dpkit.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not ctx.resilient_parsing:  # resilient: shell completion
            ctx.fail(f"No such command '{args[0]}'.{_hint(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's own
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _hint(name: str) -> str:
    import difflib  # noqa: PLC0415 - only the mistaken pay its 10 ms

    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    return f" Did you mean '{near[0]}'?" if near else f" Commands: {', '.join(_COMMANDS)}."


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dpkit", message="dpkit %(version)s")
def dpkit() -> None:
    """Data-parallel LLM inference, declared in TOML and run by Trio."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code: 0 good, 1 failed, 2 bad config or usage, 3 not started, 130 interrupted, 143
    terminated before all was done.
    """
    if sys.stdout is None:
        click.echo("error: standard output is closed; give it somewhere to go", err=True)
        return FAILED
    try:
        code = _run(args)
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `dpkit … | head` has read enough
        code = FAILED
        _drop_output()
    except OSError as error:
        code = FAILED
        said = _output_fails() or error
        _drop_output()
        click.echo(f"error: {said}", err=True)
    return code


def _run(args: Sequence[str] | None) -> int:
    try:
        code = dpkit.main(args, prog_name="dpkit", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except (click.ClickException, DpkitError) as error:
        click.echo(_message(error), err=True)
        return _exit_code(error)
    except (KeyboardInterrupt, OSError):
        raise
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - ours or somebody else's bug
        click.echo(_bug(error, sys.argv[1:] if args is None else args), err=True)
        return FAILED
    return code if isinstance(code, int) else 0


def _bug(error: BaseException, args: Sequence[str]) -> str:
    """What is said of an exception that nobody expected: a line, or all of it for who asks."""
    import traceback  # noqa: PLC0415 - only the unlucky pay for it

    from dpkit.cli.words import describe  # noqa: PLC0415

    level = os.environ.get("DPKIT__LOG__LEVEL", "")
    if "debug" in level or any("log.level=" in arg and "debug" in arg for arg in args):
        return "".join(traceback.format_exception(error)).rstrip()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (
        f"error: internal error: {describe(error)}; please report it, with the traceback that "
        "--set log.level=debug or DPKIT__LOG__LEVEL=debug shows"
    )


def _message(error: click.ClickException | DpkitError) -> str:
    if isinstance(error, ConfigError):
        return "\n".join(map(_problem, error.problems))
    if isinstance(error, DpkitError):
        return f"error: {error}"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()  # the help itself
    context = getattr(error, "ctx", None)
    hint = f"\nTry '{context.command_path} --help'." if context else ""
    return f"error: {error.format_message()}{hint}"


def _problem(problem: str) -> str:
    """A problem at a line of a file begins with its place, as editors know it; all else is said."""
    return problem if _PLACE.match(problem) else f"error: {problem}"


def _exit_code(error: click.ClickException | DpkitError) -> int:
    if isinstance(error, click.ClickException):
        return error.exit_code
    if isinstance(error, ConfigError):
        return USAGE
    return NOT_STARTED if isinstance(error, _NO_START) else FAILED


def _output_fails() -> str | None:
    """What is wrong with standard output, if it is that: what it did not take is still there.

    Unless it has no buffer (`PYTHONUNBUFFERED`), when it is tried once more.
    """
    try:
        if getattr(sys.stdout, "write_through", False):
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        return f"writing to standard output: {error.strerror}; give it somewhere to go"
    return None


def _drop_output() -> None:
    """Let what cannot be written go nowhere, so that Python's own last flush is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
