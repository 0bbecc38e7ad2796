"""Scenarios small enough to reason about."""

from __future__ import annotations

from dpkit.config.load import parse_config
from dpkit.simulate.run import Scenario
from dpkit.simulate.settings import simulated, smallest_kv, text_for
from dpkit.simulate.workloads import make_workload
from dpkit.traces import Ask, Trace


def scenario_of(
    *asks: tuple[float, int, int], engines: int = 2, preset: str = "h100-8b", text: str = ""
) -> Scenario:
    """Requests as (arrival, prompt, output), for engines of one preset."""
    config = parse_config(f'[[engines]]\nmodel = "cost:{preset}"\ncount = {engines}\n{text}')
    made = tuple(
        Ask(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)
        for arrival_s, prompt, output in asks
    )
    return Scenario(config=simulated(config), trace=Trace(name="lab", asks=made))


def workload_of(name: str, *, rows: int | None = None, clients: int = 1) -> Scenario:
    """A synthetic workload with the engines that it was made for."""
    config = simulated(parse_config(text_for(name)))
    trace = make_workload(name, rows=rows).clipped(smallest_kv(config))
    return Scenario(config=config, trace=trace, clients=clients)
