"""`dpkit bench`: puts load on a server, or on a cluster brought up for it, and reports."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from attrs import evolve

from dpkit.bench.address import parse_url
from dpkit.bench.arrivals import Arrivals
from dpkit.bench.lengths import Fixed, parse_lengths
from dpkit.bench.plan import Load
from dpkit.bench.slo import parse_slo
from dpkit.cli.benching import Bench, Forms
from dpkit.config.checks import BadValue
from dpkit.config.units import parse_duration
from dpkit.errors import DpkitError
from dpkit.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from dpkit.bench.lengths import Lengths
    from dpkit.traces import Trace

_REQUESTS = 100
_CONCURRENCY = 16
_PROMPT, _OUTPUT = 128, 64


def _parsed(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A callback for click: what a function refuses is a mistake of usage."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except BadValue as error:
            raise click.BadParameter(error.problem, ctx, param) from None
        except DpkitError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return convert


def _parse_warm_up(text: str) -> tuple[int, float]:
    """Requests and seconds: a number, or a duration."""
    return (int(text), 0.0) if text.isdecimal() else (0, parse_duration(text))


def _checked_url(text: str) -> str:
    """The text itself: a wrong URL is a mistake of usage, not a server that is down."""
    parse_url(text)
    return text


_LENGTHS: dict[str, Any] = {"metavar": "LENGTHS", "callback": _parsed(parse_lengths)}
_TIME: dict[str, Any] = {"metavar": "TIME", "callback": _parsed(parse_duration)}
_WARM_UP: dict[str, Any] = {"metavar": "TIME|N", "callback": _parsed(_parse_warm_up)}
_URL: dict[str, Any] = {"callback": _parsed(_checked_url)}
_SLO: dict[str, Any] = {"metavar": "SLO", "callback": _parsed(parse_slo)}
_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True, max=1e6)


@click.command("bench")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option(
    "--url", **_URL, help="Of a server with OpenAI's routes: http://HOST:PORT or unix:PATH."
)
@click.option("--model", help="Of the server; its first one unless given.")
@click.option("--chat", is_flag=True, help="Ask for chats rather than completions.")
@click.option("--api-key-env", metavar="NAME", help="Variable with the server's key.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--concurrency", type=_COUNT, help="Closed loop: so many under way.")
@click.option("--rate", type=_POSITIVE, help="Open loop: so many begin a second.")
@click.option(
    "--arrivals",
    type=click.Choice([each.value for each in Arrivals]),
    default="poisson",
    show_default=True,
)
@click.option("--trace", type=click.Path(), help="Open loop: moments and lengths of a file.")
@click.option("--speed", type=_POSITIVE, default=1.0, help="How much faster than the trace.")
@click.option("--requests", type=_COUNT, help=f"So many are measured; {_REQUESTS} unless bounded.")
@click.option("--duration", **_TIME, help="They begin within so long.")
@click.option("--warm-up", **_WARM_UP, help="What comes before.")
@click.option("--prompt-tokens", **_LENGTHS, help=f"{_PROMPT}, uniform:A,B or lognormal:M,S.")
@click.option("--output-tokens", **_LENGTHS, help=f"Likewise; {_OUTPUT} unless given.")
@click.option("--lengths", type=click.Path(), help="Lengths of such a file, one after the other.")
@click.option("--prefix", type=click.IntRange(min=0), default=0, help="Tokens that all share.")
@click.option("--ignore-eos", is_flag=True, help="Answers are as long as they may be.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default="greedy")
@click.option("--timeout", **_TIME, default="10m", show_default=True, help="Of a request.")
@click.option("--slo", **_SLO, help="ttft=…,tpot=…,itl=…,e2e=… of a TIME.")
@click.option("--seed", type=click.IntRange(min=0), help="Of all choices; a new one unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--html", type=click.Path(), help="Write a page with plots there, too.")
@click.option("--records", type=click.Path(), help="Write a line of JSON for each request there.")
def command(**options: Any) -> int:
    """Put load on a server (--url) or on the cluster that FILE declares, and say how it did.

    FILE (default: dpkit.toml) is brought up for it and asked without HTTP. Without --rate and
    --trace the loop is closed: --concurrency requests are under way (16), and the next one begins
    when one has ended. Exits with 1 if a request failed. Ctrl-C reports what there is so far.
    """
    _refuse_contradictions(options)
    warm_up_requests, warm_up_time = options["warm_up"] or (0, 0.0)
    trace = options["trace"] or options["lengths"]
    # A new one each time: the same prompts again would be found in a server's prefix cache.
    seed = secrets.randbelow(1_000_000) if options["seed"] is None else options["seed"]
    open_loop = options["rate"] or options["trace"]
    bounded = options["requests"] or options["duration"] or options["trace"]
    load = Load(
        rate=options["rate"],
        arrivals=Arrivals(options["arrivals"]),
        concurrency=None if open_loop else options["concurrency"] or _CONCURRENCY,
        trace=_trace(options, seed),
        replay=options["trace"] is not None,
        speed=options["speed"],
        prompt_tokens=_or_fixed(options["prompt_tokens"], trace, _PROMPT),
        output_tokens=_or_fixed(options["output_tokens"], trace, _OUTPUT),
        requests=options["requests"] or (None if bounded else _REQUESTS),
        duration=options["duration"],
        warm_up_requests=warm_up_requests,
        warm_up_time=warm_up_time,
        ignore_eos=options["ignore_eos"],
        temperature=options["temperature"],
        timeout=options["timeout"],
        seed=seed,
    )
    forms = Forms(
        as_json=options["as_json"],
        as_markdown=options["as_markdown"],
        html=options["html"],
        records=options["records"],
    )
    return trio.run(
        Bench(
            load=load,
            forms=forms,
            slo=options["slo"],
            prefix=options["prefix"],
            file=options["file"],
            overrides=options["overrides"],
            url=options["url"],
            model=options["model"],
            chat=options["chat"],
            api_key=_key(options["api_key_env"]),
        ).run
    )


def _trace(options: dict[str, Any], seed: int) -> Trace | None:
    if options["trace"]:
        return read_trace(options["trace"], seed=seed)
    if options["lengths"]:
        trace = read_trace(options["lengths"], needs_times=False)
        return evolve(trace, name=options["lengths"])  # as whoever reads the report knows it
    return None


def _or_fixed(lengths: Lengths | None, trace: str | None, tokens: int) -> Lengths | None:
    return lengths if lengths or trace else Fixed(tokens)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").partition(",")[0].strip()):
        raise click.UsageError(
            f"--api-key-env {variable}: there is no such variable, or no key in it"
        )
    return key


_TOGETHER = (
    ("rate", "concurrency"),
    ("rate", "trace"),
    ("concurrency", "trace"),
    ("lengths", "trace"),
    ("as_json", "as_markdown"),
)
_NEEDS = (
    ("model", "url"),
    ("chat", "url"),
    ("api_key_env", "url"),
    ("speed", "trace"),
    ("arrivals", "rate"),
)


def _refuse_contradictions(options: dict[str, Any]) -> None:
    """An option that nothing obeys is as wrong as one that nobody knows."""
    context = click.get_current_context()
    line = click.core.ParameterSource.COMMANDLINE
    given = {name for name in options if context.get_parameter_source(name) is line}
    for one, other in _TOGETHER:
        if given >= {one, other}:
            raise click.UsageError(f"{_flag(one)} and {_flag(other)} exclude each other")
    for one, other in _NEEDS:
        if one in given and other not in given:
            raise click.UsageError(f"{_flag(one)} says nothing without {_flag(other)}")
    for one in ("html", "records"):  # before the run, not after it
        if one in given and not Path(options[one]).absolute().parent.is_dir():
            raise click.UsageError(f"{_flag(one)} {options[one]}: there is no such directory")
    for one in ("file", "overrides"):
        if given >= {one, "url"}:
            raise click.UsageError(f"--url is a server that is up: leave out {_flag(one)}")


def _flag(name: str) -> str:
    names = {"file": "FILE", "overrides": "--set", "as_json": "--json", "as_markdown": "--markdown"}
    return names.get(name, f"--{name.replace('_', '-')}")
