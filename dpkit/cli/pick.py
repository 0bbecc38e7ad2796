"""`dpkit explain --pick`: where a request would go, and what the policy thought of every engine.

A dry run of the dispatch itself, on the books of a cluster as its `/statistics` page has them. What
a policy has learnt in a running client is not in there: learnt costs are at their priors, and no
engine is known to have cached anything.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
import msgspec
from attrs import asdict, frozen

from dpkit.balancer.late import LateDispatch, make_dispatch, usual_binding
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.engine.checks import size_problem
from dpkit.engine.limits import EngineLimits
from dpkit.errors import RequestRejected
from dpkit.messages import EngineId, GenerateRequest, SamplingParams, Snapshot, StepReport
from dpkit.names import Binding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dpkit.abc import Policy
    from dpkit.cli.facts import GroupFacts
    from dpkit.config.schema import Config

READY = "ready"

_MOST = 10_000_000
"""Tokens of a prompt: more than any model takes, and made within a second."""

_NAMED = 3
"""Engines that are named in a line that is about many."""


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The request: how long its prompt is, or which tokens."""

    prompt_tokens: int | list[int]
    max_tokens: int = 16
    engine: str | None = None
    request_id: str = "asked"


class _Core(msgspec.Struct):
    running: int
    waiting: int
    kv_cache_usage: float


class _Engine(msgspec.Struct):
    engine: str
    core: _Core
    report: StepReport = StepReport()
    state: str = READY


class _Held(msgspec.Struct):
    request_id: str
    engine: str | None
    prompt_tokens: int = 1
    output_tokens: int = 0


class _Client(msgspec.Struct):
    requests: list[_Held] = []


class State(msgspec.Struct):
    """What `/statistics` says, as far as a pick depends on it."""

    engines: list[_Engine]
    clients: list[_Client] = []


@frozen(kw_only=True)
class Candidate:
    """One engine, and why it was, or was not, the one."""

    engine: str
    score: float | None
    inflight: int
    waiting: int
    running: int
    kv_cache_usage: float
    reports: bool  # whether it says itself what it has to do


@frozen(kw_only=True)
class Pick:
    """What became of the request."""

    rule: str
    engine: str
    is_held: bool  # it waits at the client until that engine can begin it
    candidates: Sequence[Candidate]


def read_request(text: str) -> GenerateRequest:
    """Read the request of `--pick`.

    Raises:
        UsageError: it is none.
    """
    try:
        asked = msgspec.json.decode(text, type=Asked)
        tokens = asked.prompt_tokens
        if isinstance(tokens, int) and tokens > _MOST:
            raise ValueError(f"no prompt has {tokens:,} tokens, {_MOST:,} at most")  # noqa: TRY301 - likewise
        prompt = tuple(range(tokens) if isinstance(tokens, int) else tokens)
        if not prompt:
            raise ValueError("the prompt has no token")  # noqa: TRY301 - said like all else
        sampling = SamplingParams(max_tokens=asked.max_tokens)
    except ValueError as error:
        raise click.UsageError(
            f"--pick: {error}; write for example '{{\"prompt_tokens\": 1000}}'"
        ) from None
    return GenerateRequest(
        request_id=asked.request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        engine=asked.engine,
    )


def read_state(path: Path) -> State:
    """Read the books of `--state`.

    Raises:
        UsageError: it cannot be read, or no engine in it is ready.
    """
    try:
        told = _json(path)
        state = msgspec.convert(told.get("statistics", told), State)
    except (OSError, ValueError, AttributeError) as error:
        raise click.UsageError(
            f"--state {path}: {error}; it must be what a server's /statistics page says, or the "
            "statistics of a cluster as JSON"
        ) from None
    if not any(engine.state == READY for engine in state.engines):
        raise click.UsageError(f"--state {path}: no engine is {READY}, so none may be picked")
    return state


def difference(groups: Sequence[GroupFacts], state: State) -> str:
    """Which engines are only in the config, and which only in the state; empty: they are the same.

    Either may be right: a cluster may have been scaled, or the file be another's.
    """
    declared = [f"{group.name}-{number}" for group in groups for number in range(group.count)]
    known = [_id(each.engine).name for each in state.engines]
    missing = [name for name in declared if name not in set(known)]
    strange = [name for name in known if name not in set(declared)]
    parts = [f"without {_some(missing)}"] * bool(missing) + [f"with {_some(strange)}"] * bool(
        strange
    )
    return ", ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + f" and {more} more" * (more > 0)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it is no JSON") from error


def dry_run(
    config: Config, groups: Sequence[GroupFacts], state: State, request: GenerateRequest
) -> Pick:
    """Pick as the first client would, or the arbiter of several, with parts that are their own.

    Raises:
        RequestRejected: the request names an engine that is not there, or the one that it would go
        to would refuse it as too long. What the policy raises.
    """
    ready = [(rank, each) for rank, each in enumerate(state.engines) if each.state == READY]
    problems = {each.engine: _size_problem(each, groups, request) for _, each in ready}
    if request.engine is None and all(problems.values()):  # no policy need look at such a prompt
        _refuse(problems, max(ready, key=lambda known: _holds(known[1], groups))[1].engine)
    binding = config.balancer.bound or usual_binding(config.balancer.policy)
    is_late = binding is Binding.LATE  # then one knows what all have sent
    count = 1 if is_late else max(1, len(state.clients))
    policy = load_policy(config.balancer.policy, rng=random.Random(0))  # noqa: S311 - no secret
    ledger = Ledger()
    view = LoadView((), ledger, client_count=count)
    dispatch = make_dispatch(ledger, view, policy, binding)
    for rank, each in ready:
        limits = _limits(each, groups)
        dispatch.add(_id(each.engine), rank, None if limits is None else limits.room)
    told = state.clients if is_late else state.clients[:1]
    for held in _held(told, {str(engine) for engine in view.engines}):
        dispatch.place(held)
    rows = [
        (each.core.waiting, each.core.running, each.core.kv_cache_usage) for each in state.engines
    ]
    dispatch.on_snapshot(Snapshot(loads=tuple(rows)))
    for _, each in ready:
        if each.report.kv_tokens:  # else it is of an engine that does not tell
            dispatch.on_report(_id(each.engine), each.report)
    candidates = _candidates(policy, view, request)
    index = None
    if isinstance(dispatch, LateDispatch):
        pin = None if request.engine is None else dispatch.index_of(request.engine)
        index = dispatch.open_pass().offer(dispatch.prepare(request), pin)
    placement = dispatch.place(request)
    _refuse(problems, str(placement.engine))
    return Pick(
        rule=placement.reason.rule,
        engine=str(placement.engine),
        is_held=isinstance(dispatch, LateDispatch) and index is None,
        candidates=candidates,
    )


def _candidates(policy: Policy, view: LoadView, request: GenerateRequest) -> list[Candidate]:
    return [
        Candidate(
            engine=str(load.engine),
            score=policy.score(request, index, view),
            inflight=load.inflight,
            waiting=load.waiting,
            running=load.running,
            kv_cache_usage=load.kv_cache_usage,
            reports=load.report is not None,
        )
        for index, load in enumerate(view.loads)
    ]


def _held(clients: Iterable[_Client], engines: set[str]) -> Iterator[GenerateRequest]:
    """What clients have on engines; whose tokens they are does not matter."""
    for number, held in enumerate(chain.from_iterable(each.requests for each in clients)):
        if held.engine in engines:
            yield GenerateRequest(
                request_id=f"held {number} {held.request_id}",
                prompt_token_ids=(-1,) * max(1, held.prompt_tokens),
                engine=_id(held.engine).name,
            )


def _id(shown: str) -> EngineId:
    name, _, epoch = shown.partition("#")
    return EngineId(name, int(epoch) if epoch.isdigit() else 0)


def _limits(engine: _Engine, groups: Sequence[GroupFacts]) -> EngineLimits | None:
    """What an engine can hold and do at once, by the group it is named after; None: unknown."""
    name = _id(engine.engine).name.rpartition("-")[0]
    group = next((group for group in groups if group.name == name), None)
    if not (group and group.kv and group.max_num_seqs and group.max_num_batched_tokens):
        return None
    return EngineLimits(
        max_num_seqs=group.max_num_seqs,
        max_num_batched_tokens=group.max_num_batched_tokens,
        block_size=group.kv.block_size,
        num_blocks=group.kv.blocks,
        prefix_cache=group.prefix_cache,
        max_model_len=group.max_model_len,
    )


def _size_problem(
    engine: _Engine, groups: Sequence[GroupFacts], request: GenerateRequest
) -> str | None:
    limits = _limits(engine, groups)
    return None if limits is None else size_problem(request, limits)


def _holds(engine: _Engine, groups: Sequence[GroupFacts]) -> int:
    """Tokens of the longest request that it takes."""
    limits = _limits(engine, groups)
    return 0 if limits is None else min(limits.kv_tokens, limits.max_model_len or limits.kv_tokens)


def _refuse(problems: Mapping[str, str | None], engine: str) -> None:
    """Say what the engine would, if it is that the request is too long."""
    if (problem := problems.get(engine)) is not None:
        raise RequestRejected(f"--pick: {engine} would refuse the request: {problem}")


def pick_json(pick: Pick) -> dict[str, Any]:
    """For programs."""
    return asdict(pick)


def pick_lines(pick: Pick, request: GenerateRequest) -> Iterator[str]:
    """For people: the decision, and a row for each engine."""
    fate = "is held for" if pick.is_held else "goes to"
    until = ", until it can begin there," if pick.is_held else " at once,"
    size = len(request.prompt_token_ids)
    prompt = f"A prompt of {size:,} token{'s' * (size != 1)}"
    yield f"{prompt} {fate} {pick.engine}{until} by {pick.rule}."
    width = max(len(each.engine) for each in pick.candidates)
    for each in pick.candidates:
        mark = "*" if each.engine == pick.engine else " "
        score = "no score" if each.score is None else f"score {each.score:<10.6g}"
        silent = "" if each.reports else "; does not say what it has to do"
        yield (
            f"{mark} {each.engine:<{width}}  {score}  {each.inflight} in flight, {each.waiting} "
            f"waiting, {each.running} running, {each.kv_cache_usage:.0%} of KV in use{silent}"
        )
