"""A holding policy that fails keeps nobody waiting, ends no engine, and whose fault it is hears it.

What several clients' arbiter does then is in `tests.nursery.test_arbiter`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.errors import PolicyFailed
from dpkit.names import Cause, FinishReason
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH
from dpkit.testing.idle import check_idle
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import LoadView, Pass
    from dpkit.balancer.books import Prospect
    from dpkit.messages import GenerateRequest
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.submission import Submission

BAD = 13
"""Tokens of a prompt that the policy fails at."""


class Failing(ExpectedTtft):
    """Fails at what it is told to fail at."""

    fails_at = frozenset[str]()

    def age(self, prospect: Prospect) -> float:
        self.fail("age", prospect.prompt)
        return super().age(prospect)

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        self.fail("pick", len(request.prompt_token_ids))
        return super().pick(request, view)

    def open_pass(self, view: LoadView) -> Pass:
        self.fail("open_pass", BAD)
        return FailingPass(self, super().open_pass(view))

    def fail(self, what: str, prompt: int) -> None:
        if what in Failing.fails_at and prompt == BAD:
            raise ZeroDivisionError(what)


class FailingPass:
    """As it says."""

    def __init__(self, policy: Failing, to: Pass) -> None:
        self._policy = policy
        self._to = to

    @property
    def is_over(self) -> bool:
        return self._to.is_over

    def offer(self, prospect: Prospect, index: int | None = None) -> int | None:
        self._policy.fail("offer", prospect.prompt)
        return self._to.offer(prospect, index)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *what: monkeypatch.setattr(Failing, "fails_at", frozenset(what))


def lab(engines: int = 2) -> Lab:
    """Steps of 100 ms with 8 tokens each."""
    return Lab(
        [Timed() for _ in range(engines)],
        settings=f'balancer = {{ policy = "{__name__}:Failing" }}\n',
        scheduler="max_num_batched_tokens = 8, max_num_seqs = 4",
        blocks=1024,
    )


def ask(cluster: Cluster, tokens: int, **options: Any) -> Submission:
    client = cluster.clients[-1]
    return client.submit([tokens] * tokens, sink=lambda _: None, max_tokens=8, **options)


async def fill_up(cluster: Cluster) -> None:
    """Give every engine a step and a half of prompt: no more fits beside it."""
    for number in range(2):
        ask(cluster, 16, engine=f"e{number}-0")
    await trio.testing.wait_all_tasks_blocked()


async def test_while_nobody_can_be_held_all_go_where_the_policy_picks(
    autojump_clock: object, fails: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async with lab().open() as cluster:
        await fill_up(cluster)
        waiting = ask(cluster, 8)
        fails("open_pass")
        another = ask(cluster, 8)
        assert waiting.engine is not None
        assert another.engine is not None
        fails()
        assert ask(cluster, 8).engine is None, "it holds again"
        await trio.sleep(5)
        assert cluster.client.statistics().causes == {Cause.LENGTH: 5}
        assert all(engine.restarts == 0 for engine in cluster.statistics().engines)
        check_idle(cluster)
    assert "nobody can be held, and whoever is first is picked for: policy" in caplog.text


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("picks", [True, False])
async def test_whom_it_cannot_hold_it_picks_for_and_others_are_held(
    autojump_clock: object,
    fails: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    clients: int,
    *,
    picks: bool,
) -> None:
    async with lab().open(clients=clients) as cluster:
        fails("offer", *([] if picks else ["pick"]))
        with (
            nullcontext()
            if picks
            else pytest.raises(PolicyFailed, match="raised ZeroDivisionError: pick")
        ):
            ask(cluster, BAD)
        await fill_up(cluster)
        good, bad = ask(cluster, 8), ask(cluster, BAD)
        assert good.engine is None
        await trio.sleep(5)
        assert good.finish_reason == FinishReason.LENGTH
        assert bad.finish_reason == (FinishReason.LENGTH if picks else FinishReason.ERROR)
        counted = cluster.statistics().clients
        causes = sum((Counter(each.causes) for each in counted), Counter())
        assert causes == ({Cause.LENGTH: 5} if picks else {Cause.LENGTH: 3, Cause.REFUSED: 2})
        assert not told(cluster, EventKind.COORDINATOR_LOST)
        assert all(engine.restarts == 0 for engine in cluster.statistics().engines)
        check_idle(cluster)
    assert "cannot be held, and is picked for: policy" in caplog.text


@pytest.mark.parametrize("clients", [1, 2])
async def test_whoever_has_lost_its_engine_has_its_turn_whatever_the_policy_says(
    autojump_clock: object, fails: Callable[..., None], clients: int
) -> None:
    made = lab()
    async with made.open(clients=clients) as cluster:
        lost = ask(cluster, BAD)
        await trio.testing.wait_all_tasks_blocked()
        fails("age")
        made.faulty[0].inject(CRASH)
        await settle()
        await trio.sleep(20 * STEP_S)
        assert str(lost.engine) == "e1-0"
        assert lost.finish_reason is not None
        assert not cluster.audit()
        check_idle(cluster)
