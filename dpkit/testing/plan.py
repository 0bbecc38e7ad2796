"""What happens in a world, as data: who asks when, and what goes wrong when, all from one seed.

A plan can be printed, changed by hand and run again. Knows nothing of how it is carried out
(`dpkit.testing.world`).
"""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve, frozen

from dpkit.config.load import parse_config
from dpkit.names import PolicyName, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpkit.config.schema import Config

HORIZON = 1.0
"""Virtual seconds in which requests come and things go wrong."""

BLOCKS = 24
"""Of the first engine's cache: room for two or three requests."""

TEAM = "team"
"""Target of what befalls the engines that restart together; the others are ``e0``, ``e1``, …"""

INFLIGHT = (None, 4, 16)
QUEUED = (4, 1024)
BUDGETS = (0.0, 0.2, 1.0)
"""What `admission` may say."""

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
    SCALE = "scale"  # the engine's group is to have `size` engines
    RELOAD = "reload"  # new settings, by the number `size`; of the odd ones a group is replaced
    COORDINATOR = "coordinator"  # it dies, and all its lives of the next `size` seconds
    DRAIN = "drain"  # nothing more is admitted; after `size` seconds all that is left is aborted


WORLD_WIDE = {Blow.STATS, Blow.LEAVE, Blow.BURST, Blow.COORDINATOR, Blow.DRAIN}

SIZES: Mapping[Blow, Callable[[random.Random], float]] = {
    Blow.OUT_OF_MEMORY: lambda rng: rng.randint(1, 30),
    Blow.STILLBORN: lambda rng: rng.randint(0, 1),
    Blow.SLOW: lambda rng: rng.choice([3, 10, 100]),
    Blow.STATS: lambda rng: rng.choice([0.1, 0.5, 1.0]),
    Blow.LEAVE: lambda rng: rng.choice([0.3, 1.0]),
    Blow.BURST: lambda rng: rng.randint(5, 20),
    Blow.SCALE: lambda rng: rng.randint(0, 3),
    Blow.RELOAD: lambda rng: rng.randint(0, 9),
    Blow.COORDINATOR: lambda rng: rng.choice([0.0, 0.5]),
    Blow.DRAIN: lambda rng: rng.choice([0.05, 0.3, float("inf")]),
}


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
    engine: str | None = None  # to which it is pinned


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
    team: int = 0
    """So many engines more, which restart together."""
    intensity: int = 3
    retries: int = 1
    retry_budget: float = 0.2

    def __str__(self) -> str:
        engines = f"{self.engines} engines" + f" and a team of {self.team}" * bool(self.team)
        lines = [f"seed {self.seed}: {engines}, {self.clients} clients, {self.policy}"]
        return "\n  ".join([*lines, *map(str, self.troubles)])

    @property
    def groups(self) -> tuple[str, ...]:
        """The targets of troubles: a group of one each, and the team."""
        return tuple(f"e{n}" for n in range(self.engines)) + (TEAM,) * bool(self.team)


def config_of(plan: Plan, model: str, *, replaced: str = "") -> Config:
    """The cluster of a plan: each group has caches of another size, by which it is known.

    Args:
        plan: The plan.
        model: Name of the model of all engines.
        replaced: A group that is not as it was, so that its engines are replaced by a reload.
    """
    groups = [
        f"""
        [[engines]]
        name = "{group}"
        count = {plan.team if group == TEAM else 1}
        model = "{model}"
        kv = {{ block_size = 4, num_blocks = {BLOCKS + number} }}
        scheduler.max_num_seqs = {3 if group == replaced else 4}
        scheduler.max_num_batched_tokens = 32
        [engines.supervision]
        strategy = "{Strategy.ONE_FOR_ALL if group == TEAM else Strategy.ONE_FOR_ONE}"
        step_timeout = "1s"
        backoff = "50ms"
        intensity = {plan.intensity}
        """
        for number, group in enumerate(plan.groups)
    ]
    bound = "" if plan.max_inflight is None else f"max_inflight = {plan.max_inflight}"
    return parse_config(
        f"""
        cluster = {{ seed = {plan.seed} }}
        balancer = {{ policy = "{plan.policy}" }}
        [admission]
        max_queued = {plan.max_queued}
        queue_timeout = "5s"
        retries = {plan.retries}
        retry_budget = {plan.retry_budget}
        {bound}
        {"".join(groups)}
        """
    )


def changed(plan: Plan, number: float) -> Plan:
    """What a reload makes of a plan, by its number."""
    rng = random.Random(f"{plan.seed}/reload {number:g}")  # noqa: S311 - no secrets
    return evolve(
        plan,
        policy=rng.choice(list(PolicyName)),
        max_inflight=rng.choice(INFLIGHT),
        max_queued=rng.choice(QUEUED),
        retry_budget=rng.choice(BUDGETS),
    )


def draw_plan(seed: int, *, requests: int = 24, troubles: int = 8) -> Plan:
    """Make the plan of a seed.

    Args:
        seed: Same seed, same plan, in any process.
        requests: About how many come, bursts aside.
        troubles: At most how many things go wrong.
    """
    rng = random.Random(f"{seed}/plan")  # noqa: S311 - no secrets
    team = rng.choice([0, 0, 2, 3])
    plan = Plan(
        seed=seed,
        engines=rng.randint(1, 2) if team else rng.randint(2, 4),
        team=team,
        clients=rng.randint(1, 2),
        policy=rng.choice(list(PolicyName)),
        max_inflight=rng.choice(INFLIGHT),
        max_queued=rng.choice(QUEUED),
        intensity=rng.choice([0, 3, 3]),
        retries=rng.choice([1, 1, 3]),
        retry_budget=rng.choice(BUDGETS),
        asks=(),
        troubles=(),
    )
    asks = [draw_ask(rng, plan, rng.uniform(0, HORIZON)) for _ in range(requests)]
    found = [_draw_trouble(rng, plan.groups) for _ in range(rng.randint(0, troubles))]
    return evolve(plan, asks=tuple(sorted(asks)), troubles=tuple(sorted(found)))


def draw_ask(rng: random.Random, plan: Plan, at: float) -> Ask:
    """Make a request that comes at a given time."""
    hurried, careful = rng.random() < 0.2, rng.random() < 0.3
    return Ask(
        at=at,
        client=rng.randrange(plan.clients),
        prompt="".join(rng.choices("abcdefgh ", k=rng.randint(1, 40))),
        max_tokens=rng.randint(1, 24),
        timeout=rng.uniform(0.05, 1.0) if hurried else None,
        patience=rng.uniform(0.0, 0.5) if rng.random() < 0.2 else float("inf"),
        pause=rng.uniform(0.0, 0.1) if rng.random() < 0.2 else 0.0,
        resume=careful,
        engine=f"{rng.choice(plan.groups)}-{rng.randint(0, 1)}" if rng.random() < 0.1 else None,
    )


def _draw_trouble(rng: random.Random, groups: Sequence[str]) -> Trouble:
    blow = rng.choice(list(Blow))
    target = EVERYONE if blow in WORLD_WIDE else rng.choice(groups)
    size = SIZES[blow](rng) if blow in SIZES else 0
    # A drain ends what it comes upon, so let that have lived.
    at = rng.uniform(HORIZON / 2 if blow is Blow.DRAIN else 0, HORIZON)
    return Trouble(at, blow, target, size)
