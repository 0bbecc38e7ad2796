"""`dpkit explain`: what a config does, in plain words. Starts nothing and loads no weights."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from dpkit.cli.facts import group_facts
from dpkit.cli.joining import how_to_start
from dpkit.cli.losses import at_the_end, on_loss
from dpkit.cli.served import serving
from dpkit.config.load import load_config
from dpkit.config.units import show_duration
from dpkit.names import Binding, PolicyName, StartMethod, Transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.cli.facts import GroupFacts, KvFacts
    from dpkit.config.schema import Config

# What decides, in one sentence each; docs/balancing.md says more.
POLICIES = {
    PolicyName.KV_PRESSURE: (
        "the engine with the lowest max(clients * in-flight, waiting + running) "
        "+ 6 * waiting * max(0, KV usage - 0.5) gets it; ties rotate."
    ),
    PolicyName.INFLIGHT: (
        "the engine with the lowest max(in-flight, waiting + running) gets it; of equals the first."
    ),
    PolicyName.QUEUE_WEIGHTED: (
        "the engine with the lowest 4 * waiting + running gets it; "
        "of equals the first from where this client begins to look."
    ),
    PolicyName.LEAST_TOKENS: (
        "the engine with the fewest tokens gets it: of own requests in flight the prompt and half "
        "of max_tokens, and for each request of other clients as many as own ones have on average; "
        "ties rotate."
    ),
    PolicyName.POWER_OF_TWO: (
        "of two engines drawn at random the one with the lower in-flight + others gets it."
    ),
    PolicyName.ROUND_ROBIN: "each engine in turn gets one, whatever its load.",
    PolicyName.RANDOM: "any engine gets it, each as likely as the others.",
    PolicyName.EXPECTED_TTFT: (
        "the engine where its first token is expected soonest, in seconds of work that are learned "
        "from the engines' steps, gets it; what is cached there counts, and what the answer costs."
    ),
}


_BOUND = {
    Binding.EARLY: "the moment it comes",
    Binding.LATE: "when that could begin it with the next step, and waits at the client till then",
    None: "the moment it comes, unless its policy, which is not loaded for this, can hold it",
}


@click.command("explain")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--pick", metavar="JSON", help="Where this request would go, and why.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="With --pick: how the cluster is, as its /statistics page says.",
)
def command(
    file: str, overrides: tuple[str, ...], as_json: bool, pick: str | None, state: Path | None
) -> None:
    """Say in plain words what FILE (default: dpkit.toml) does: engines, memory, balancing, end.

    Starts nothing; of a model that is here it reads the config.json only. With --pick it says where
    a request would go, for example '{"prompt_tokens": 1000}', and what each engine's score is.
    """
    config = load_config(file, overrides=overrides)
    ends = itertools.accumulate(group.count for group in config.engines)
    groups = [
        group_facts(group, file, end - group.count)
        for group, end in zip(config.engines, ends, strict=True)
    ]
    if pick is not None or state is not None:
        _pick(config, groups, file, pick, state, as_json=as_json)
        return
    if as_json:
        click.echo(json.dumps({"file": file, **_facts(config, groups)}))
        return
    for paragraph in _paragraphs(file, config, groups):
        click.echo(paragraph if _is_command(paragraph) else _filled(paragraph))


def _pick(
    config: Config,
    groups: Sequence[GroupFacts],
    file: str,
    asked: str | None,
    state: Path | None,
    *,
    as_json: bool,
) -> None:
    if asked is None or state is None:
        raise click.UsageError("--pick and --state go together: what is asked, and of whom")
    from dpkit.cli import pick  # noqa: PLC0415 - policies cost time

    request = pick.read_request(asked)
    books = pick.read_state(state)
    picked = pick.dry_run(config, groups, books, request)
    if difference := pick.difference(groups, books):
        said = f"its engines, which the pick is among, are not those of {file}: {difference}"
        click.echo(f"warning: --state {state}: {said}", err=True)
    if as_json:
        click.echo(json.dumps(pick.pick_json(picked)))
        return
    for line in pick.pick_lines(picked, request):
        click.echo(line)


def _is_command(paragraph: str) -> bool:
    """Whether it is to be copied as it stands."""
    return paragraph.startswith("    ")


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 100, subsequent_indent="  ", break_on_hyphens=False)


def explain_policy(name: str) -> str:
    """How a policy decides, as one sentence that goes on from a colon."""
    if name in POLICIES:
        return POLICIES[PolicyName(name)]
    return "your own class decides, which is not loaded to explain a file."


def _facts(config: Config, groups: Sequence[GroupFacts]) -> dict[str, object]:
    policy = config.balancer.policy
    return {
        "cluster": config.cluster.name,
        "engines": [attrs.asdict(group) for group in groups],
        "policy": {"name": policy, "decides": explain_policy(policy)},
        "coordinator": attrs.asdict(config.coordinator),
        "admission": attrs.asdict(config.admission),
        "server": [line.strip() for line in serving(config)],
        "on_engine_loss": [line.strip() for line in on_loss(config)],
        "at_the_end": list(at_the_end(config)),
        "grace": config.cluster.grace,
    }


def _paragraphs(file: str, config: Config, groups: Sequence[GroupFacts]) -> Iterator[str]:
    count = _count(sum(group.count for group in groups), "engine")
    models = ", ".join(dict.fromkeys(group.model for group in groups))
    yield f"{file} declares cluster {config.cluster.name!r}: {count} of {models}."
    for group, asked in zip(groups, config.engines, strict=True):
        yield ""
        yield from _group(group)
        if group.vllm is None:
            yield from _sizes(group)
        else:
            yield from how_to_start(asked, group.start_with)
    yield ""
    yield from _balancing(config)
    yield ""
    yield _admission(config)
    yield ""
    yield from serving(config)
    yield ""
    yield from on_loss(config)
    yield ""
    yield from at_the_end(config)


def _group(group: GroupFacts) -> Iterator[str]:
    verb, each = ("is", "It") if group.count == 1 else ("are", "Each")
    where = _where(group)
    yield f"{group.engines} {verb} {where}. {each} serves {group.model}{_weights(group)}."
    if group.note:
        yield f"  Of this model not all is known: {group.note}."


def _sizes(group: GroupFacts) -> Iterator[str]:
    yield f"  {_memory(group.kv)}{' Equal beginnings share blocks.' * group.prefix_cache}"
    seqs, tokens = group.max_num_seqs, group.max_num_batched_tokens
    yield (
        f"  One step: at most {_or_own(seqs, 'running request')} and {_or_own(tokens, 'token')}."
        f"{_share(group.long_prefill_share)}"
    )
    if group.max_model_len:
        yield f"  One request: at most {group.max_model_len:,} tokens, prompt and answer together."


def _share(share: float) -> str:
    return f" Long prompts leave others {1 - share:.0%} of it." if share < 1 else ""


def _where(group: GroupFacts) -> str:
    one, process = group.count == 1, group.process
    if group.vllm is not None:
        return f"{'an engine' if one else 'engines'} that somebody else starts"
    if process is None:
        return f"{'a task' if one else 'tasks'} in this process"
    who = "a process of its own" if one else "processes"
    sockets = "Unix sockets" if process.transport is Transport.IPC else "TCP on 127.0.0.1"
    begun = (
        "forked from one that loads the model"
        if process.start is StartMethod.FORK
        else f"which load{'s' * one} the model for {'itself' if one else 'themselves'}"
    )
    return f"{who}, {begun}, and heard over {sockets}"


def _weights(group: GroupFacts) -> str:
    quantised = "" if group.quant == "none" else f", weights in {group.quant}"
    if group.computed_in is None:
        return ""
    by_itself = " (auto)" if group.dtype == "auto" else ""
    where = "" if group.device == "cpu" else f" on {group.device}"
    return f", computed in {group.computed_in}{by_itself}{where}{quantised}"


def _memory(kv: KvFacts | None) -> str:
    if kv is None:
        return "KV cache: as large as the model says when it is loaded."
    held = f" ({kv.bytes / 2**20:,.0f} MiB)" if kv.bytes else ""
    room = _count(kv.typical_requests, "request")
    return (
        f"KV cache: {kv.tokens:,} tokens in {kv.blocks:,} blocks of {kv.block_size}{held}: room "
        f"for {room} of typical length ({kv.typical_tokens:,} tokens, prompt and answer together)."
    )


def _balancing(config: Config) -> Iterator[str]:
    policy, coordinator = config.balancer.policy, config.coordinator
    bound = _BOUND[config.balancer.bound]
    yield (
        f"Balancing: a request gets its engine {bound}. "
        f"By policy {policy}, {explain_policy(policy)}"
    )
    if not coordinator.publish:
        yield "  Engines publish no counts: only the client's own in-flight requests are known."
        return
    yield (
        "  The coordinator tells every client how many requests wait and run on each engine and "
        f"how full its KV cache is, at most every {show_duration(coordinator.interval)}."
    )
    if coordinator.wave_coordination:
        yield "  Engines step together, in waves; an idle one is woken when another gets work."


def _admission(config: Config) -> str:
    admission = config.admission
    when = "at once" if config.balancer.bound is Binding.EARLY else "as said"
    most = (
        "while an engine is ready"
        if admission.max_inflight is None
        else f"up to {_count(admission.max_inflight, 'request')} of a client"
    )
    queue = (
        f"{admission.max_queued:,} more may wait, for at most "
        f"{show_duration(admission.queue_timeout)}; others are refused with Overloaded."
    )
    return f"Admission: requests go to engines {when}, {most}. {queue}"


def _or_own(limit: int | None, noun: str) -> str:
    return f"the model's own number of {noun}s" if limit is None else _count(limit, noun)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
