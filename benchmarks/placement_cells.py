"""What is compared: pools, traces and troubles by name, and the run that each of them is.

One cell is one policy on one case at one load. Knows nothing of the order in which cells are run,
or of what is made of their figures.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from dpkit.config.load import parse_config
from dpkit.simulate.capacity import capacity_rps
from dpkit.simulate.faults import parse_faults
from dpkit.simulate.run import Scenario
from dpkit.simulate.settings import costs_of, simulated, smallest_kv
from dpkit.simulate.study import find, with_policy
from dpkit.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dpkit.config.schema import Config
    from dpkit.traces import Trace

    Row = dict[str, Any]

SEED, OURS = "kv_pressure", "expected_ttft"
PEERS = ("dynamo_style", "llm_d_style", "sglang_style", "expected_ttft@early")
NEAR = 0.03
"""A neighbour of a load is so far from it: each run has luck, and the mean of three has less."""

ENGINES = 8
BLOCK_SIZE = 512
"""Of KV blocks where there is a prefix cache: that of the traces' own block ids."""


@frozen(kw_only=True)
class Case:
    """A trace, the pool that serves it, and what goes wrong there."""

    name: str
    label: str = ""
    """In a plot, where eight stand side by side."""
    file: str
    preset: str
    rows: int
    has_cache: bool = False
    faults: tuple[str, ...] = ()
    small: int = 0
    """So many engines, the last ones, have half the KV cache."""
    lockstep: bool = False
    load: float | None = None
    """The only one that it is run at; None: whichever is asked for."""

    @property
    def pool(self) -> str:
        """What its capacity depends on: that of healthy, equal engines which step alone."""
        cache = f"cache of {BLOCK_SIZE}" if self.has_cache else "no cache"
        return f"{self.file}, {self.rows} rows, {ENGINES} x {self.preset}, {cache}"


@frozen(kw_only=True)
class Table:
    """Cases that are compared under the same policies; the first is what the others are held to."""

    cases: tuple[Case, ...]
    policies: tuple[str, ...]


@frozen(kw_only=True)
class Cell:
    """One run."""

    table: str
    case: Case
    load: float
    clients: int
    policy: str

    @property
    def key(self) -> Row:
        """What tells it from all others, as its row in the file begins."""
        return {
            "table": self.table,
            "case": self.case.name,
            "rows": self.case.rows,
            "load": self.load,
            "clients": self.clients,
            "policy": self.policy,
        }


H100, SMALL, EXPERTS = "h100-8b", "h100-32b", "h200-30b-a3b"


def _case(
    name: str, label: str, file: str, preset: str, rows: int, *, has_cache: bool = False
) -> Case:
    return Case(name=name, label=label, file=file, preset=preset, rows=rows, has_cache=has_cache)


AZURE = _case("azure-conv", "azure", "azure-conv-a", H100, 9_000)
MOONCAKE = _case("mooncake-conv", "mooncake", "mooncake-conv-a", EXPERTS, 5_000)
SYNTHETIC = _case("mooncake-synthetic", "synthetic", "mooncake-synthetic", EXPERTS, 3_900)
AGENTS = _case("agentic-code", "agents", "agentic-code-a", EXPERTS, 3_114, has_cache=True)
LONG_AGENTS = _case("agentic-long", "long", "agentic-long-a", EXPERTS, 1_500, has_cache=True)
NO_CACHE = (
    _case("azure-code", "code", "azure-code-a", H100, 5_000),
    AZURE,
    _case("azure-conv-32b", "32b", "azure-conv-a", SMALL, 5_000),
    MOONCAKE,
    SYNTHETIC,
    _case("servegen-mlarge", "mlarge", "servegen-mlarge-a", H100, 12_000),
    _case("servegen-r1", "r1", "servegen-r1-a", EXPERTS, 2_500),
    _case("arxiv", "arxiv", "arxiv-summ-a", H100, 4_000),
)
WITH_CACHE = (
    AGENTS,
    LONG_AGENTS,
    evolve(MOONCAKE, has_cache=True),
    evolve(SYNTHETIC, has_cache=True),
)


def _troubled() -> Iterator[Case]:
    """Three traces in three troubles, and one in lockstep."""
    for case in (AGENTS, MOONCAKE, AZURE):
        yield evolve(case, name=f"{case.name}, one dies", faults=("kill:2@35%-65%",), load=0.75)
        yield evolve(case, name=f"{case.name}, two slow", faults=("slow:6,7*2",), small=2, load=0.7)
        yield evolve(case, name=f"{case.name}, 30% leave", faults=("abort:30%",), load=1.0)
    yield evolve(MOONCAKE, name="mooncake-conv, lockstep", lockstep=True, load=0.35)


TABLES = {
    "no-cache": Table(cases=NO_CACHE, policies=(SEED, OURS)),
    "prefix": Table(cases=WITH_CACHE, policies=(SEED, *PEERS, OURS)),
    "troubles": Table(cases=tuple(_troubled()), policies=(SEED, "expected_ttft@early", OURS)),
    "stale": Table(
        cases=(AGENTS, evolve(SYNTHETIC, has_cache=True)),
        policies=(
            SEED,
            "placement_blind:Blind@early",
            "placement_blind:Blind@late",
            "placement_blind:Credulous@late",
            "expected_ttft@early",
            OURS,
        ),
    ),
}


def cells_of(
    table: str,
    loads: Sequence[float],
    *,
    clients: int = 1,
    policies: Sequence[str] = (),
    cases: Sequence[str] = (),
    rows: int | None = None,
) -> list[Cell]:
    """Lay a table out, load by load.

    Args:
        table: Its name.
        loads: Those to run at, where cases have none of their own.
        clients: Each with a balancer of its own.
        policies: Only these; none: all of the table.
        cases: Likewise.
        rows: At most so many of each trace; None: as many as there are to be.
    """
    cells = [
        Cell(table=table, case=_cut(case, rows), load=load, clients=clients, policy=policy)
        for load in loads
        for case in TABLES[table].cases
        for policy in TABLES[table].policies
        if case.name in (cases or {case.name}) and policy in (policies or {policy})
    ]
    own = (evolve(cell, load=cell.case.load or cell.load) for cell in cells)
    return list(dict.fromkeys(own))


def _cut(case: Case, rows: int | None) -> Case:
    return case if rows is None else evolve(case, rows=min(rows, case.rows))


def measure_capacity(folder: Path, case: Case) -> Row:
    """Requests a second of a case's pool at best, as a row."""
    began = time.process_time()
    healthy = evolve(case, faults=(), small=0, lockstep=False)
    config = config_of(healthy)
    scenario = Scenario(config=config, trace=_trace(folder, healthy, config))
    rps = capacity_rps(scenario)
    return {"pool": case.pool, "rps": rps, "cpu_s": _since(began)}


def measure_cell(folder: Path, cell: Cell, capacity: float) -> Row:
    """Run a cell and measure it, as a row; `capacity` is that of its pool, in requests a second."""
    began = time.process_time()
    scenario = scenario_of(folder, cell, capacity)
    finding = find(with_policy(scenario, cell.policy), cell.policy, None, lambda _: None)
    answers = finding.outcome.answers
    own = {
        "ttft_max_s": round(max(each.ttft_s for each in answers if each.tokens), 9),
        "failed": sum(each.failed for each in answers),
        "tokens": sum(each.tokens for each in answers),
        "cpu_s": _since(began),
    }
    return cell.key | finding.result.as_json() | own


def _since(began: float) -> float:
    return round(time.process_time() - began, 3)


def scenario_of(folder: Path, cell: Cell, capacity: float) -> Scenario:
    """A cell's run, under no policy yet."""
    config = config_of(cell.case)
    trace = _trace(folder, cell.case, config)
    rate = len(trace.asks) / trace.span_s
    trace = trace.scaled(rate / (cell.load * capacity))
    faults = parse_faults(cell.case.faults, span_s=trace.span_s, engines=ENGINES)
    return Scenario(config=config, trace=trace, clients=cell.clients, faults=faults)


def config_of(case: Case) -> Config:
    """The cluster of a case."""
    kv = f"kv.block_size = {BLOCK_SIZE}" if case.has_cache else "kv.prefix_cache = false"
    text = f'[[engines]]\nmodel = "cost:{case.preset}"\ncount = {ENGINES}\n{kv}\n'
    overrides = ("coordinator.wave_coordination=true",) if case.lockstep else ()
    config = simulated(parse_config(text, overrides=overrides))
    if not case.small:
        return config
    [group] = config.engines
    half = evolve(group.kv, num_blocks=costs_of(group)[1].num_blocks // 2, memory=None)
    small = evolve(group, name="small", count=case.small, kv=half)
    return evolve(config, engines=(evolve(group, count=ENGINES - case.small), small))


def _trace(folder: Path, case: Case, config: Config) -> Trace:
    trace = read_trace(folder / f"{case.file}.csv.gz", rows=case.rows)
    return trace.clipped(smallest_kv(config))
