"""The peers' scores against numbers worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.prefixes import BLOCK
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, GenerateRequest, Room, StepReport
from dpkit.simulate.peers import PEERS, DynamoStyle, LlmDStyle, PeerStyle, SglangStyle
from dpkit.testing.conform_policy import check_policy

if TYPE_CHECKING:
    from dpkit.balancer.dispatch import Placement

ROOM = Room(tokens_per_step=8000, requests=64, kv_tokens=100_000)
SESSION = tuple(range(10 * BLOCK))


class Router:
    """A peer with two engines."""

    def __init__(self, style: PeerStyle) -> None:
        self.style = style
        ledger = Ledger()
        self.view = LoadView((), ledger)
        self.dispatch = EarlyDispatch(ledger, self.view, style)
        for rank in range(2):
            self.dispatch.add(EngineId(f"e{rank}"), rank, ROOM)
        self._asked = 0

    def request(self, prompt: int | tuple[int, ...], engine: str | None = None) -> GenerateRequest:
        """One like no other, unless the prompt is given."""
        self._asked += 1
        tokens = (10_000 + self._asked,) * prompt if isinstance(prompt, int) else prompt
        return GenerateRequest(request_id=f"r{self._asked}", prompt_token_ids=tokens, engine=engine)

    def send(self, prompt: int | tuple[int, ...], engine: str) -> Placement:
        """Place a request."""
        return self.dispatch.place(self.request(prompt, engine))

    def costs(self, prompt: int | tuple[int, ...]) -> list[float | None]:
        """Of both engines, for a request that is not sent."""
        request = self.request(prompt)
        return [self.style.score(request, index, self.view) for index in range(2)]


def test_dynamo_counts_blocks_to_prefill_and_blocks_in_use() -> None:
    router = Router(DynamoStyle())
    router.send(SESSION, "e0")
    # On the first, 1,280 tokens are to be prefilled and held, and of this one 128 more of each. On
    # the second, all of it.
    assert router.costs((*SESSION, *range(128))) == [
        pytest.approx((1280 + 128 + 1280 + 128) / 16),
        pytest.approx((1408 + 1408) / 16),
    ]


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    router = Router(LlmDStyle())
    router.send(SESSION, "e0")
    for index, waiting, used in ((0, 0, 50_000), (1, 4, 0)):
        told = StepReport(requests=10, waiting=waiting, kv_tokens=100_000, kv_tokens_used=used)
        router.dispatch.on_report(router.view.engines[index], told)
    assert router.costs((*SESSION, *range(1280))) == [
        pytest.approx(-(2 * 1 + 2 * 0.5 + 3 * 0.5)),
        pytest.approx(-(2 * 0 + 2 * 1 + 3 * 0)),
    ]


def test_llm_d_without_reports_goes_by_snapshots() -> None:
    router = Router(LlmDStyle())
    router.view.load(0).hear(3, 1, 0.0)
    first, second = router.costs(100)
    assert first is not None
    assert second is not None
    assert first - second == pytest.approx(2.0)


def test_sglang_goes_for_the_prefix_unless_loads_are_uneven() -> None:
    router = Router(SglangStyle(most_apart=3))
    router.send(SESSION, "e0")
    assert router.costs((*SESSION, *range(640))) == [640.0, 1920.0]
    assert router.costs(300) == [10.0, 0.0]  # no prefix: to the smaller cache
    for _ in range(3):
        router.send(1, "e0")
    assert router.costs((*SESSION, *range(640))) == [4.0, 0.0]


def test_a_cache_is_lost_with_its_life() -> None:
    router = Router(SglangStyle())
    placement = router.send(SESSION, "e0")
    router.dispatch.remove(placement.engine)
    router.dispatch.release(placement)
    router.dispatch.add(EngineId("e0", 1), 0, ROOM)
    assert router.costs(SESSION) == [0.0, 0.0]


def test_ties_begin_where_this_client_begins_to_look() -> None:
    ledger = Ledger()
    view = LoadView([EngineId(f"e{n}") for n in range(4)], ledger, client_index=1, client_count=2)
    assert (
        load_policy(PEERS["dynamo_style"]).pick(
            GenerateRequest(request_id="r", prompt_token_ids=(1,)), view
        )
        == 2
    )


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_a_policy_like_any_other(name: str) -> None:
    check_policy(lambda: load_policy(PEERS[name]))
