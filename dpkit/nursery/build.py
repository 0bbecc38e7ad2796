"""From a config to the parts of a cluster: models, engines, clients. Starts nothing."""

from __future__ import annotations

import math
import os
import random
import sys
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import trio

from dpkit.abc import Model
from dpkit.balancer.late import LateDispatch, make_dispatch, usual_binding
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.config.checks import meeting_point
from dpkit.engine.core import EngineCore
from dpkit.engine.models import (
    load_face,
    load_model,
    load_served,
    load_tokenizer,
    loads_at_once,
)
from dpkit.engine.publish import PublishGate
from dpkit.names import Binding, EngineKind
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.client import Client
from dpkit.nursery.flight import Limits
from dpkit.nursery.flights import Flights
from dpkit.nursery.inbox import Inbox
from dpkit.nursery.limits import limits_of
from dpkit.nursery.slot import EngineSlot
from dpkit.nursery.supervisor import Restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpkit.abc import ModelFace, Policy
    from dpkit.config.schema import Config, EngineGroupConfig
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineId, EngineStats
    from dpkit.names import Dtype, Quant
    from dpkit.nursery.arbitration import Dispatches
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.fanin import StatsFanIn
    from dpkit.nursery.gathering import Gathering
    from dpkit.nursery.launchers import Launchers
    from dpkit.nursery.life import MakeLife
    from dpkit.nursery.membership import Membership

    ModelKey = tuple[EngineKind, str, Dtype, Quant, str]
    Models = Mapping[ModelKey, Model | ModelFace]

_BEFORE_THE_HEAD = 0.9
"""Of the time for a start: then a rank has waited for the others for long enough. It knows who did
not come, which its head does not."""


def model_key(group: EngineGroupConfig) -> ModelKey:
    """What makes two groups share what was loaded here."""
    return group.kind, group.model, group.dtype, group.quant, group.device


async def load_models(config: Config) -> Models:
    """Load each model once, however many groups and engines use it.

    Of those that compute in processes just what a client needs, which is not their weights.

    Raises:
        ModelNotFound, ModelUnsupported: a model cannot be had.
    """
    models: dict[ModelKey, Model | ModelFace] = {}
    for key in dict.fromkeys(map(model_key, config.engines)):
        kind, name, dtype, quant, device = key
        if kind is EngineKind.VLLM:
            load = partial(load_served, name)
        else:
            loader = load_model if kind is EngineKind.LOCAL else load_face
            load = partial(loader, name, dtype=dtype, quant=quant, device=device)
        # Weights take seconds, hence the thread. But while one works, a virtual clock sees nothing
        # to wait for and jumps to the next deadline: what is simulated must use none.
        models[key] = load() if loads_at_once(name) else await trio.to_thread.run_sync(load)
    for model in models.values():
        if isinstance(model, Model) and not model.inline:
            model.threads_per_engine = threads_per_engine(config, models)
    return models


def threads_per_engine(config: Config, models: Models) -> int:
    """Let the engines that compute have the cores of this machine, each as many."""
    ours = (group for group in config.engines if group.kind is not EngineKind.VLLM)
    computing = (g for g in ours if not getattr(models[model_key(g)], "inline", False))
    engines = sum(group.count for group in computing)
    return max(1, len(os.sched_getaffinity(0)) // max(1, engines))


def restarts(group: EngineGroupConfig) -> Restarts:
    """How often the engines of a group are restarted.

    Those that join as often as they come: to restart one is to wait for it, whoever starts it.
    """
    asked = group.supervision
    return Restarts(
        strategy=asked.strategy,
        intensity=sys.maxsize if group.kind is EngineKind.VLLM else asked.intensity,
        period=asked.period,
        backoff=asked.backoff,
        backoff_max=asked.backoff_max,
        jitter=asked.jitter,
    )


class Builder:
    """Makes the parts of one cluster, all wired to the same membership, fan-in and events."""

    def __init__(
        self,
        config: Config,
        models: Models,
        *,
        membership: Membership,
        fanin: StatsFanIn,
        events: EventLog,
        launchers: Launchers,
        on_waves: Callable[[int, bool], None],
    ) -> None:
        self._config = config
        self._models = models
        self._membership = membership
        self._fanin = fanin
        self._events = events
        self._launchers = launchers
        self._on_waves = on_waves
        self._gatherings: dict[str, Gathering] = {}  # by the name of their group

    def rng(self, use: str) -> random.Random:
        """A stream for each use: what one draws changes nothing for the others."""
        seed = self._config.cluster.seed
        return random.Random(None if seed is None else f"{seed}/{use}")  # noqa: S311 - no secrets

    def slot(
        self,
        group: EngineGroupConfig,
        number: int,
        rank: int,
        *,
        first_epoch: int = 0,
        held: bool = False,
    ) -> EngineSlot:
        """Make the place of engine `number` of a group; nothing lives there yet."""
        joins = group.kind is EngineKind.VLLM
        gathering = self._gathering(group) if self._config.steps_together(group) else None
        if gathering is not None:
            gathering.ranks.add(rank)
        return EngineSlot(
            first_epoch=first_epoch,
            held=held,
            name=f"{group.name}-{number}",
            rank=rank,
            model=group.model,
            make_life=self._joined_lives(group, number) if joins else self._lives_of(group),
            step_timeout=group.supervision.step_timeout,
            patience=group.vllm.join_timeout if joins else math.inf,
            membership=self._membership,
            events=self._events,
            gathering=gathering,
        )

    def _gathering(self, group: EngineGroupConfig) -> Gathering:
        """Where the engines of a group meet; of a changed group it is another one."""
        from dpkit.nursery.gathering import Gathering  # noqa: PLC0415 - ZeroMQ only where needed

        if group.name not in self._gatherings:
            joins = group.kind is EngineKind.VLLM
            self._gatherings[group.name] = Gathering(
                bind=self._joined_binding(group) if joins else self._local_binding(group),
                interval=self._config.coordinator.interval,
                on_waves=self._on_waves,
                place=meeting_point(group.vllm.rendezvous or "") if joins else None,
            )
        return self._gatherings[group.name]

    def _joined_binding(self, group: EngineGroupConfig) -> Callable[[], tuple[str, str, str]]:
        from dpkit.wire.coordinator import LOOPBACK  # noqa: PLC0415 - ZeroMQ only where needed

        desk = self._launchers.desk(group)
        return lambda: (desk.any_port, desk.any_port, LOOPBACK)  # clients are on this side

    def _local_binding(self, group: EngineGroupConfig) -> Callable[[], tuple[str, str, str]]:
        host, transport = self._launchers.host(group, lockstep=True), group.process.transport
        return lambda: host.addresses(transport)

    def _lives_of(self, group: EngineGroupConfig) -> MakeLife:
        model = self._models[model_key(group)]
        if isinstance(model, Model) and group.kind is EngineKind.LOCAL:
            return self._local_lives(group, model)
        return self._remote_lives(group, model)

    def _local_lives(self, group: EngineGroupConfig, model: Model) -> MakeLife:
        limits = limits_of(group, model.spec)

        def make(engine: EngineId, rank: int, on_lost: Callable[[Exception], None]) -> BusyLoop:
            return BusyLoop(
                engine=engine,
                index=rank,
                model=model,
                core=EngineCore(model, limits=limits),
                inbox=Inbox(),
                publish=self._publish,
                gate=self._gate(),
                on_lost=on_lost,
            )

        return make

    def _remote_lives(self, group: EngineGroupConfig, model: ModelFace) -> MakeLife:
        from dpkit.nursery.hosts import EngineHost  # noqa: PLC0415 - ZeroMQ only where needed
        from dpkit.nursery.remote import RemoteLife  # noqa: PLC0415 - likewise

        together = self._config.steps_together(group)
        host = EngineHost(
            group=group,
            model=self._launchers.host(group, lockstep=together),
            limits=limits_of(group, model.spec),
            threads=threads_per_engine(self._config, self._models),
            kv_publish_delta=self._config.coordinator.kv_publish_delta,
            gathering=self._gathering(group) if together else None,
            lockstep=self._lockstep(group) if together else None,
        )

        def make(engine: EngineId, rank: int, on_lost: Callable[[Exception], None]) -> RemoteLife:
            return RemoteLife(
                engine=engine,
                rank=rank,
                host=host,
                publish=self._publish,
                gate=self._gate(),
                on_lost=on_lost,
            )

        return make

    def _lockstep(self, group: EngineGroupConfig) -> Mapping[str, Any]:
        """Fields of `LockstepPlan`."""
        coordinator = self._config.coordinator
        return {
            "sync_interval": coordinator.sync_interval,
            "vote_timeout": coordinator.vote_timeout,
            "start_timeout": group.process.start_timeout * _BEFORE_THE_HEAD,
        }

    def _joined_lives(self, group: EngineGroupConfig, number: int) -> MakeLife:
        from dpkit.nursery.joined import JoinedLife  # noqa: PLC0415 - ZeroMQ only where needed

        desk = self._launchers.desk(group)
        gathering = self._gathering(group) if self._config.steps_together(group) else None
        spec = self._models[model_key(group)].spec

        def make(engine: EngineId, rank: int, on_lost: Callable[[Exception], None]) -> JoinedLife:
            return JoinedLife(
                engine=engine,
                index=rank,
                rank=number,
                desk=desk,
                gathering=gathering,
                spec=spec,
                model=group.model,
                publish=self._publish,
                gate=self._gate(),
                on_lost=on_lost,
                on_leaving=partial(self._membership.leave, engine, lost=False),
            )

        return make

    @property
    def _publish(self) -> Callable[[EngineStats], None] | None:
        return self._fanin.publish if self._config.coordinator.publish else None

    def _gate(self) -> PublishGate:
        return PublishGate(self._config.coordinator.kv_publish_delta)

    def limits(self) -> Limits:
        """What each client admits."""
        admission = self._config.admission
        return Limits(
            max_inflight=admission.max_inflight,
            max_queued=admission.max_queued,
            queue_timeout=admission.queue_timeout,
            retries=admission.retries,
            retry_budget=admission.retry_budget,
            resume=admission.resume,
            moves=admission.resume or self._config.is_uniform,
            largest=self._largest(),
        )

    def _largest(self) -> EngineLimits | None:
        """Of the engines that hold the longest request; engines that join say it themselves."""
        groups = self._config.engines
        if any(group.kind is EngineKind.VLLM for group in groups):
            return None
        group = max(groups, key=self._longest_of)
        return limits_of(group, self._models[model_key(group)].spec)

    @cached_property  # asked for by every request over HTTP; likewise the next one
    def longest(self) -> int:
        """The most tokens, of prompt and output together, that every engine has room for."""
        return min(self._longest_of(group) for group in self._config.engines)

    @cached_property
    def longest_prompt(self) -> int | None:
        """The most tokens that a prompt can have; None: engines that join say what they take."""
        if self._largest() is None:
            return None
        return max(self._longest_of(group) for group in self._config.engines) - 1

    def _longest_of(self, group: EngineGroupConfig) -> int:
        limits = limits_of(group, self._models[model_key(group)].spec)
        room = limits.kv_tokens + 1  # the token sampled last is never computed
        return room if limits.max_model_len is None else min(room, limits.max_model_len)

    def policy(self, index: int | str) -> Policy:
        """Make the policy of one client, or of all of them."""
        return load_policy(self._config.balancer.policy, rng=self.rng(f"{index}/policy"))

    @property
    def _bound(self) -> Binding:
        """When requests get their engines, as far as the policy is asked."""
        balancer = self._config.balancer
        return balancer.bound or usual_binding(balancer.policy)

    def binding(self, count: int) -> Binding:
        """How each of `count` clients binds by itself: late only if it knows all that is sent."""
        return self._bound if count == 1 else Binding.EARLY

    def needs_arbiter(self, count: int) -> bool:
        """Whether `count` clients bind late, and can do so only together."""
        return self._bound is not self.binding(count)

    def everybody(self, count: int) -> LateDispatch | None:
        """Make the books of `count` clients together; None: they need no arbiter.

        Raises:
            ConfigError: the policy cannot bind late. What making it raises.
        """
        if not self.needs_arbiter(count):
            return None
        ledger = Ledger()
        dispatch = make_dispatch(ledger, LoadView((), ledger), self.policy("all"), Binding.LATE)
        assert isinstance(dispatch, LateDispatch)  # noqa: S101 - as it was asked for
        return dispatch

    def dispatches(self, clients: Sequence[Flights]) -> Dispatches:
        """Make what `Arbitration.use` wants: of each client on the books that it has.

        Raises:
            ConfigError: the policy cannot bind late. What making it raises.
        """
        count = len(clients)
        binding = self.binding(count)
        each = [make_dispatch(*c.books, self.policy(i), binding) for i, c in enumerate(clients)]
        return each, self.everybody(count)

    def client(self, index: int, count: int) -> tuple[Client, Flights]:
        """Make one of `count` clients, with a balancer of its own that knows no engine yet."""
        config, ledger, serves = self._config, Ledger(), self._config.engines[0]
        view = LoadView((), ledger, client_index=index, client_count=count)
        view.steps_together = any(map(config.steps_together, config.engines))
        flights = Flights(
            make_dispatch(ledger, view, self.policy(index), self.binding(count)),
            limits=self.limits(),
            membership=self._membership,
            events=self._events,
        )
        self._membership.add_client(flights)
        model = self._models[model_key(serves)]
        client = Client(
            ledger=ledger,
            flights=flights,
            tokenizer=load_tokenizer(model, serves.model),
            vocab_size=model.spec.vocab_size,
            rng=self.rng(f"{index}"),
            prefix=f"{config.cluster.name}-{index}",
        )
        return client, flights
