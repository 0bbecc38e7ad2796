"""What happens in a world, as data: who asks when, and what goes wrong when, all from one seed.

A plan can be printed, changed by hand and run again. Knows nothing of how it is carried out
(`dpkit.testing.world`).
"""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from dpkit.config.load import parse_config
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config

HORIZON = 1.0
"""Virtual seconds in which requests come and things go wrong."""

BLOCKS = 24
"""Of the first engine's cache: room for two or three requests."""

EVERYONE = "*"
"""Target of what befalls no engine in particular."""


class Blow(enum.StrEnum):
    """What can go wrong in a world."""

    CRASH = "crash"  # the engine's next step raises
    HANG = "hang"  # its next step never ends
    GARBAGE = "garbage"  # its next step samples what is no token
    OUT_OF_MEMORY = "oom"  # its next step of more than `size` tokens fails
    STILLBORN = "stillborn"  # its next life but `size` fails at the start
    SLOW = "slow"  # its steps take `size` times as long, until mended
    MEND = "mend"
    STATS = "stats"  # that share of all stats is lost, others are late, doubled and reordered
    LEAVE = "leave"  # that share of those who read go away
    BURST = "burst"  # so many requests come at once


class Trouble(NamedTuple):
    """One thing that goes wrong."""

    at: float
    blow: Blow
    target: str = EVERYONE
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.blow} {self.target} {self.size:g}"


class Ask(NamedTuple):
    """One request and how it is read."""

    at: float
    client: int
    prompt: str
    max_tokens: int
    timeout: float | None = None  # its own deadline
    patience: float = float("inf")  # seconds after which its reader goes away
    pause: float = 0.0  # seconds that its reader takes for each output
    resume: bool = False


@frozen(kw_only=True)
class Plan:
    """One world: its cluster, its trace and its troubles."""

    seed: int
    engines: int
    clients: int
    policy: PolicyName
    max_inflight: int | None
    max_queued: int
    asks: tuple[Ask, ...]
    troubles: tuple[Trouble, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.engines} engines, {self.clients} clients, {self.policy}"]
        return "\n  ".join([*lines, *map(str, self.troubles)])


def config_of(plan: Plan, model: str) -> Config:
    """The cluster of a plan: each engine has a cache of another size, by which it is known."""
    groups = [
        f"""
        [[engines]]
        name = "e{number}"
        model = "{model}"
        kv = {{ block_size = 4, num_blocks = {BLOCKS + number} }}
        scheduler = {{ max_num_seqs = 4, max_num_batched_tokens = 32 }}
        supervision = {{ step_timeout = "1s", backoff = "50ms" }}
        """
        for number in range(plan.engines)
    ]
    bound = "" if plan.max_inflight is None else f"max_inflight = {plan.max_inflight}"
    return parse_config(
        f"""
        cluster = {{ seed = {plan.seed} }}
        balancer = {{ policy = "{plan.policy}" }}
        [admission]
        max_queued = {plan.max_queued}
        queue_timeout = "5s"
        {bound}
        {"".join(groups)}
        """
    )


def draw_plan(seed: int, *, requests: int = 24, troubles: int = 8) -> Plan:
    """Make the plan of a seed.

    Args:
        seed: Same seed, same plan, in any process.
        requests: About how many come, bursts aside.
        troubles: At most how many things go wrong.
    """
    rng = random.Random(f"{seed}/plan")  # noqa: S311 - no secrets
    engines, clients = rng.randint(2, 4), rng.randint(1, 2)
    asks = [draw_ask(rng, clients, rng.uniform(0, HORIZON)) for _ in range(requests)]
    return Plan(
        seed=seed,
        engines=engines,
        clients=clients,
        policy=rng.choice(list(PolicyName)),
        max_inflight=rng.choice([None, 4, 16]),
        max_queued=rng.choice([4, 1024]),
        asks=tuple(sorted(asks)),
        troubles=tuple(_draw_troubles(rng, engines, rng.randint(0, troubles))),
    )


def draw_ask(rng: random.Random, clients: int, at: float) -> Ask:
    """Make a request that comes at a given time."""
    hurried, careful = rng.random() < 0.2, rng.random() < 0.3
    return Ask(
        at=at,
        client=rng.randrange(clients),
        prompt="".join(rng.choices("abcdefgh ", k=rng.randint(1, 40))),
        max_tokens=rng.randint(1, 24),
        timeout=rng.uniform(0.05, 1.0) if hurried else None,
        patience=rng.uniform(0.0, 0.5) if rng.random() < 0.2 else float("inf"),
        pause=rng.uniform(0.0, 0.1) if rng.random() < 0.2 else 0.0,
        resume=careful,
    )


def _draw_troubles(rng: random.Random, engines: int, count: int) -> list[Trouble]:
    sizes: dict[Blow, Callable[[], float]] = {
        Blow.OUT_OF_MEMORY: lambda: rng.randint(1, 30),
        Blow.STILLBORN: lambda: rng.randint(0, 1),
        Blow.SLOW: lambda: rng.choice([3, 10, 100]),
        Blow.STATS: lambda: rng.choice([0.1, 0.5, 1.0]),
        Blow.LEAVE: lambda: rng.choice([0.3, 1.0]),
        Blow.BURST: lambda: rng.randint(5, 20),
    }
    world_wide = {Blow.STATS, Blow.LEAVE, Blow.BURST}
    found = []
    for _ in range(count):
        blow = rng.choice(list(Blow))
        target = EVERYONE if blow in world_wide else f"e{rng.randrange(engines)}-0"
        size = sizes[blow]() if blow in sizes else 0
        found.append(Trouble(rng.uniform(0, HORIZON), blow, target, size))
    return sorted(found)
