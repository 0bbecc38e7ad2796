"""Tokens that their model's tokenizer cannot turn into text end the request that they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.errors import EngineLost
from dpkit.names import Cause, FinishReason
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH
from dpkit.testing.idle import check_idle
from dpkit.text.bytes import ByteDecoder, ByteTokenizer
from tests.clusters import told
from tests.nursery.lab import Lab, Timed, settle

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Decoder(ByteDecoder):
    def feed(self, token_ids: Sequence[int]) -> str:
        if ord("!") in token_ids:
            raise OverflowError("no such letter")
        return super().feed(token_ids)


class _Tokenizer(ByteTokenizer):
    def decoder(self, prompt_token_ids: Any = ()) -> ByteDecoder:  # noqa: ARG002
        return _Decoder()


class Unreadable(Timed):
    """Its tokenizer does not know the letter that it says all the same."""

    def tokenizer(self) -> ByteTokenizer:
        return _Tokenizer()


@pytest.mark.parametrize("stop", [None, "stop"])
async def test_what_cannot_be_read_ends_as_refused_and_frees_its_engine(
    autojump_clock: object, stop: str | None
) -> None:
    async with Lab([Unreadable()]).open() as cluster:
        stream = cluster.client.generate("ab!defgh", request_id="r", stop=stop)
        async with stream:
            with pytest.raises(OverflowError, match="no such letter"):
                await stream.read_all()
            assert cluster.client.statistics().causes == {Cause.REFUSED: 1}
            with pytest.raises(OverflowError, match="no such letter"):
                await stream.__anext__()
        with pytest.raises(OverflowError, match="no such letter"):
            stream.completion()
        assert stream.finish_reason is FinishReason.ERROR
        assert (stream.text, stream.token_ids) == ("ab", list(b"ab!"))
        [end] = told(cluster, EventKind.REQUEST_ENDED)
        assert (end.reason, end.cause) == (FinishReason.ERROR, Cause.REFUSED)
        await settle()
        check_idle(cluster)


async def test_what_had_ended_when_it_was_read_has_one_end(autojump_clock: object) -> None:
    async with Lab([Unreadable()]).open() as cluster:
        async with cluster.client.generate("a!", max_tokens=2) as stream:
            await settle()
            await settle()
            await settle()
            with pytest.raises(OverflowError, match="no such letter"):
                await stream.read_all()
        assert stream.finish_reason is FinishReason.LENGTH
        assert cluster.client.statistics().causes == {Cause.LENGTH: 1}


async def test_what_ended_by_an_error_of_its_own_says_that_one(autojump_clock: object) -> None:
    lab = Lab([Unreadable()])
    lab.faulty[0].plan = {3: CRASH}
    async with lab.open() as cluster:
        async with cluster.client.generate("ab!defgh") as stream:
            for _ in range(4):
                await settle()
            with pytest.raises(EngineLost, match="was lost while it held"):
                await stream.read_all()
        assert stream.token_ids == list(b"ab!")
        assert cluster.client.statistics().causes == {Cause.ENGINE_LOST: 1}
