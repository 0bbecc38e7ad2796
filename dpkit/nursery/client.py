"""The client: places requests on engines, hands out streams, and never loses count.

Pick and charge are one synchronous step; the release goes through the object that was charged, at
the moment the engine reports the end or the reader leaves, whichever is first. Owns one dispatch
(ledger, view, policy) and the table of live streams. Knows engines only as links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import trio
from attrs import frozen

from dpkit.errors import ClusterClosed, RequestRejected
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason
from dpkit.nursery.inbox import duplicate
from dpkit.nursery.requests import RequestMaker
from dpkit.nursery.stream import OutputStream

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from dpkit.abc import EngineLink, Tokenizer
    from dpkit.balancer.dispatch import EarlyDispatch, Placement
    from dpkit.balancer.ledger import Ledger
    from dpkit.messages import Completion, EngineId, SamplingParams, Snapshot
    from dpkit.nursery.requests import Prompt, RequestOptions


@frozen(kw_only=True)
class ClientStatistics:
    """Counts since the client was made, but for `inflight`, which is now."""

    inflight: Mapping[EngineId, int]
    """Unfinished requests of this client on each engine."""
    started: int
    finished: int
    """Ended by their engine (stop, length or error) or by a stop string."""
    aborted: int
    """Left by their reader, or by the cluster's end, before they were finished."""
    late_outputs: int
    """Outputs that arrived after the release, or from another life of an engine; dropped."""


class Client:
    """Made by `open_cluster`; all methods are for Trio's thread."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        dispatch: EarlyDispatch,
        tokenizer: Tokenizer,
        rng: random.Random,
        prefix: str,
    ) -> None:
        self._ledger = ledger
        self._dispatch = dispatch
        self._maker = RequestMaker(tokenizer, rng, prefix)
        self._links: dict[EngineId, EngineLink] = {}
        self._inflight: dict[str, tuple[OutputStream, Placement]] = {}
        self._closed = False
        self._started = self._finished = self._aborted = self._late_outputs = 0

    def __repr__(self) -> str:
        return f"<Client: {len(self._inflight)} in flight, {'closed' if self._closed else 'open'}>"

    def add_link(self, link: EngineLink) -> None:
        """Make an engine reachable; the dispatch decides whether it is picked."""
        self._links[link.engine] = link

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Prepare a request; entering the returned stream sends it.

        Args:
            prompt: Text, token ids, or chat messages (``{"role": …, "content": …}``), which are
                put into the model's own chat template.
            sampling: How to sample; greedy when left out.
            **options: See `RequestOptions`; sampling fields replace those of `sampling`.

        Raises:
            RequestRejected: a field is out of range, the prompt cannot be encoded, or `n` asks for
                several completions.
        """
        [stream, *others] = self.generate_many(prompt, sampling, **options)
        if others:
            raise RequestRejected(
                f"request {stream.request_id}: n = {1 + len(others)} asks for several completions, "
                "and generate() and complete() give one; use generate_many() or complete_many()",
                request_id=stream.request_id,
            )
        return stream

    def generate_many(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[OutputStream, ...]:
        """Prepare `n` requests of one prompt: a stream for each choice.

        Each is a request of its own from here on, placed when its stream is entered; those that
        meet on one engine share the prompt's cached blocks. The first is what `generate` would
        give; the seeds of the others follow from its seed. Arguments and errors as for `generate`.
        """
        asked = self._maker.make(prompt, sampling, options)
        return tuple(OutputStream(self, each.request, each.transcript) for each in asked)

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Generate to the end and return the whole; arguments and errors as for `generate`."""
        async with self.generate(prompt, sampling, **options) as stream:
            return await stream.read_all()

    async def complete_many(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Completion, ...]:
        """Generate all `n` choices at once and return them; as `generate_many` otherwise.

        If one fails, its error is raised when its turn has come, and the others are aborted.
        """
        streams = self.generate_many(prompt, sampling, **options)
        try:
            for stream in streams:
                await stream.__aenter__()
            # One after the other is no slower: outputs gather while nobody reads.
            return tuple([await stream.read_all() for stream in streams])
        finally:
            _close(streams)

    def statistics(self) -> ClientStatistics:
        """Counts of this client; never waits."""
        return ClientStatistics(
            inflight=self._ledger.statistics().by_engine,
            started=self._started,
            finished=self._finished,
            aborted=self._aborted,
            late_outputs=self._late_outputs,
        )

    def audit(self) -> tuple[str, ...]:
        """Every contradiction in this client's books, in words; empty when they agree."""
        charged = sum(self._ledger.statistics().by_engine.values())
        ended = self._finished + self._aborted
        problems = list(self._ledger.audit())
        if charged != len(self._inflight):
            problems.append(f"{charged} requests are charged, {len(self._inflight)} have a stream")
        if self._started != ended + len(self._inflight):
            problems.append(
                f"{self._started} requests were started, {ended} have ended, "
                f"{len(self._inflight)} are in flight"
            )
        return tuple(problems)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the coordinator's newest snapshot."""
        self._dispatch.on_snapshot(snapshot)

    @trio.lowlevel.enable_ki_protection
    def begin(self, stream: OutputStream) -> Placement:
        """Pick, charge, submit, register: one synchronous step, undone as a whole if it fails.

        Called by the stream; users enter the stream.
        """
        request = stream.request
        if self._closed:
            raise _closed(request.request_id)
        if request.request_id in self._inflight:
            raise duplicate(request.request_id)
        placement = self._dispatch.place(request)
        # Registered before it is sent: an engine may answer before `submit` returns.
        self._inflight[request.request_id] = (stream, placement)
        try:
            self._links[placement.engine].submit(request)
        except BaseException:
            self._release(placement)
            raise
        self._started += 1
        return placement

    @trio.lowlevel.enable_ki_protection
    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        """Route one output to its stream; called by links, on Trio's thread, never blocks."""
        stream, placement = self._inflight.get(output.request_id, (None, None))
        if stream is None or placement is None or placement.engine != engine:
            self._late_outputs += 1
            return
        if output.finish_reason is not None:
            self._finished += 1
            self._release(placement)
        stream.deliver(output)

    @trio.lowlevel.enable_ki_protection
    def end(self, stream: OutputStream) -> None:
        """Leave a stream: abort it if its engine has not ended it yet. Idempotent.

        Called by the stream; users leave its block.
        """
        self._aborted += self._drop(stream)

    @trio.lowlevel.enable_ki_protection
    def finish(self, stream: OutputStream) -> None:
        """End a stream that has all it wanted, if its engine has not. Idempotent.

        Called by the stream: only it sees a stop string.
        """
        self._finished += self._drop(stream)

    def _drop(self, stream: OutputStream) -> bool:
        """Abort and release a request; whether it was in flight."""
        inflight, placement = self._inflight.get(stream.request_id, (None, None))
        if inflight is not stream or placement is None:
            return False
        self._links[placement.engine].abort(stream.request_id)
        self._release(placement)
        return True

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Refuse new requests, abort those in flight; their readers get `ClusterClosed`."""
        self._closed = True
        for stream, _ in list(self._inflight.values()):
            self.end(stream)
            stream.deliver(
                EngineOutput(
                    request_id=stream.request_id,
                    finish_reason=FinishReason.ABORT,
                    error=_closed(stream.request_id),
                )
            )

    def _release(self, placement: Placement) -> None:
        self._inflight.pop(placement.request.request_id, None)
        self._dispatch.release(placement)


@trio.lowlevel.enable_ki_protection  # all of them or Ctrl-C, not some
def _close(streams: Iterable[OutputStream]) -> None:
    for stream in streams:
        stream.close()


def _closed(request_id: str) -> ClusterClosed:
    return ClusterClosed(
        f"request {request_id}: the cluster is closed; make requests inside its `async with` block",
        request_id=request_id,
    )
