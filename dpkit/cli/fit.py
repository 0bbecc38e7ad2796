"""`dpkit fit`: from what was measured on a card to a preset that simulates it."""

from __future__ import annotations

import re

import click

_WANTED_OF_TABLES = (
    "lines in which what they cost varies by itself (prefills, longer ones, decodes, contexts of "
    "several lengths)"
)
_WANTED_OF_LOGS = (
    "requests in which what they cost varies by itself: only the times from first token to last "
    "are fitted, and those from schedule to first token of requests that were alone (b_us, q_ns: "
    "lone prompts of three lengths, or prompts that come while others decode; the rest: more and "
    "fewer requests at once)"
)


@click.command("fit")
@click.argument("file", type=click.Path())
@click.option("--experts", metavar="K/E", help="Of a mixture of experts: each token uses K of E.")
@click.option("--host-ms", type=click.FloatRange(0), default=0.0, help="Added to each step.")
@click.option("--kv-tokens", type=click.IntRange(1), help="What the card holds.")
@click.option("--engines", type=click.IntRange(1), default=1, help="That shared a run's requests.")
def command(
    file: str, experts: str | None, host_ms: float, kv_tokens: int | None, engines: int
) -> None:
    """Fit the costs of a step to FILE and print them as TOML, with their error.

    FILE is a table of measured steps (prefill_tokens, prefill_context, decode_seqs, kv_tokens,
    step_ms) or the log of a real run (arrival_s, prompt_tokens, output_tokens, scheduled_s,
    first_token_s, last_token_s), as CSV, gzipped or not. Written to a file, the result serves as
    `model = "cost:FILE.toml"`. Kernels leave out what the serving loop adds: --host-ms says it.
    A warning names the constants that nothing in FILE tells.

    Of a run's log, two things are fitted, and the error is of these: the time from each request's
    first token to its last, and that from schedule to first token where no other request ran. What
    prefills cost is told by those alone, and by what prompts add to the decoding of others.
    """
    from pathlib import Path  # noqa: PLC0415 - `--help` needs none of these

    from dpkit.errors import ConfigError  # noqa: PLC0415
    from dpkit.simulate.fit import Step, fit_steps  # noqa: PLC0415
    from dpkit.simulate.fit_log import fit_run  # noqa: PLC0415
    from dpkit.simulate.readings import preset_text, read_measured  # noqa: PLC0415

    measured = read_measured(file)
    steps = [each for each in measured if isinstance(each, Step)]
    served = [each for each in measured if not isinstance(each, Step)]
    if served and (experts or host_ms):
        raise click.UsageError(
            f"{file} is the log of a run: leave out --experts and --host-ms, which are for tables"
        )
    try:
        if served:
            fit = fit_run(served, engines=engines)
        else:
            fit = fit_steps(steps, experts=_experts(experts), host_ms=host_ms)
    except ValueError as error:
        raise ConfigError([f"{file}: {error}"]) from error
    if fit.untold:
        click.echo(
            f"warning: {file}: nothing in it tells {', '.join(fit.untold)}, so what is printed for "
            f"them is no measurement: add {_WANTED_OF_LOGS if served else _WANTED_OF_TABLES}",
            err=True,
        )
    click.echo(preset_text(fit, source=Path(file).name, kv_tokens=kv_tokens), nl=False)


def _experts(text: str | None) -> tuple[int, int]:
    if text is None:
        return (1, 1)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise click.UsageError(f"--experts {text}: expected K/E, such as 8/128")
    return int(match[1]), int(match[2])
