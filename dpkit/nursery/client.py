"""The client: prompts in, streams out, and never a lost count.

What users hold. Makes requests (`dpkit.nursery.requests`) and hands out what their outputs go to:
streams (`dpkit.nursery.stream`) and submissions (`dpkit.nursery.submission`). What becomes of a
request between the two is kept by `dpkit.nursery.flights`. Knows no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from attrs import frozen

from dpkit.errors import RequestRejected
from dpkit.names import Binding, Cause
from dpkit.nursery.requests import RequestMaker
from dpkit.nursery.stream import OutputStream
from dpkit.nursery.submission import Submission, check_sink
from dpkit.sampling import MOST_TOKENS

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    from dpkit.abc import Tokenizer
    from dpkit.balancer.admission import AdmissionStatistics
    from dpkit.balancer.ledger import Ledger
    from dpkit.messages import Completion, EngineId, SamplingParams
    from dpkit.nursery.flight import RequestStatistics
    from dpkit.nursery.flights import Flights
    from dpkit.nursery.meter import Counted
    from dpkit.nursery.prompts import Prompt
    from dpkit.nursery.requests import Asked, RequestOptions
    from dpkit.nursery.submission import Sink

_LEFT = (Cause.CLIENT, Cause.DRAIN, Cause.SHUTDOWN)


@frozen(kw_only=True)
class ClientStatistics:
    """Counts since the client was made, but for those that say that they are of now."""

    inflight: Mapping[EngineId, int]
    """Unfinished requests of this client on each engine, now."""
    queued: int
    """Requests that wait for a place, now."""
    requests: tuple[RequestStatistics, ...]
    """Each of those, oldest first."""
    binding: Binding
    """Whether they get an engine when they come, or when it can begin them."""
    unreported: tuple[EngineId, ...]
    """Engines that may be picked now and have told this client nothing of their work yet, or never
    do: policies know of it only what was sent there."""
    admission: AdmissionStatistics
    """The queue: who waits, by tenant; how many were refused."""
    started: int
    """Requests admitted."""
    causes: Mapping[Cause, int]
    """Requests ended, by cause; each is counted once."""
    retried: int
    """Placed anew after their engine was lost before it had delivered anything."""
    resumed: int
    """Continued on another engine, after their tokens so far."""
    taken_back: int
    """Had back from an engine short of memory that did not run them, and placed anew."""
    retries_refused: int
    """Not placed anew for want of ``admission.retry_budget``: lost with their engine."""
    late_outputs: int
    """Outputs that arrived after the release, or from another life of an engine; dropped."""
    sinks_failed: int
    """Sinks of submissions that raised; their requests ended with that."""
    picks: Mapping[str, Mapping[int, int]]
    """Requests placed, by rule (the policy's name, ``pinned`` or ``held``) and by engine's rank."""
    first_token_s: Mapping[int, Counted]
    """Seconds from admission to the first token, by rank of the engine that gave it."""

    @property
    def finished(self) -> int:
        """Ended by themselves: stop, length, or an error."""
        return sum(count for cause, count in self.causes.items() if cause not in _LEFT)

    @property
    def aborted(self) -> int:
        """Left by their reader, or by the cluster's end, before they were finished."""
        return sum(self.causes.get(cause, 0) for cause in _LEFT)


class Client:
    """Made by `open_cluster`; all methods are for Trio's thread."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        flights: Flights,
        tokenizer: Tokenizer,
        rng: random.Random,
        prefix: str,
        vocab_size: int = MOST_TOKENS + 1,
    ) -> None:
        self._ledger = ledger
        self._flights = flights
        self._maker = RequestMaker(tokenizer, rng, prefix, vocab_size)

    def __repr__(self) -> str:
        return f"<Client: {self._flights.placed} in flight, {self._flights.queued} queued>"

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Prepare a request; entering the returned stream sends it.

        Args:
            prompt: Text, token ids, or chat messages (``{"role": …, "content": …}``), which are
                put into the model's own chat template. Text is tokenized here, at once: a megabyte
                takes about a second, so bound what strangers send.
            sampling: How to sample; greedy when left out.
            **options: See `RequestOptions`; sampling fields replace those of `sampling`.

        Raises:
            RequestRejected: a field is of the wrong type or out of range, the prompt cannot be
                encoded, or `n` asks for several completions.
        """
        made = self._maker.make(prompt, sampling, options)
        asked = _only(made, "generate() and complete() give")
        return OutputStream(self._flights, asked.request, asked.transcript)

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
        return tuple(OutputStream(self._flights, each.request, each.transcript) for each in asked)

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Generate to the end and return the whole; arguments and errors as for `generate`."""
        return await self.generate(prompt, sampling, **options).complete()

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

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        sink: Sink,
        **options: Unpack[RequestOptions],
    ) -> Submission:
        """Send a request whose outputs go to a callable, for servers; see `Submission`.

        Never waits: while there is no room, the request does, in the same queue as those of
        streams.

        Args:
            prompt: As for `generate`.
            sampling: As for `generate`.
            sink: Called with an `EngineOutput` for each step, synchronously.
            **options: As for `generate`.

        Raises:
            RequestRejected: as for `generate`, or its id is in flight, or it can never be placed.
            Overloaded: the queue is full. Draining, ClusterClosed: nothing is admitted any more.
            TypeError: the sink is no plain callable.
        """
        check_sink(sink)
        asked = _only(self._maker.make(prompt, sampling, options), "submit() gives")
        submission = Submission(self._flights, asked.request, asked.transcript, sink)
        submission.start()
        return submission

    def submit_many(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        sinks: Sequence[Sink],
        **options: Unpack[RequestOptions],
    ) -> tuple[Submission, ...]:
        """Send a request for each sink, as `generate_many` does for each choice; `n` is theirs.

        All are admitted, or none: when one is refused, those before it are closed. Arguments and
        errors as for `submit`.
        """
        for sink in sinks:
            check_sink(sink)
        if sampling is None or sampling.n != len(sinks):
            options["n"] = len(sinks)
        made = self._maker.make(prompt, sampling, options)
        submissions = tuple(
            Submission(self._flights, asked.request, asked.transcript, sink)
            for asked, sink in zip(made, sinks, strict=True)
        )
        try:
            for submission in submissions:
                submission.start()
        except BaseException:
            _close(submissions)
            raise
        return submissions

    def encode(self, prompt: Prompt, *, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a prompt, as `generate` would make them; may be called in a thread.

        Args:
            prompt: As for `generate`.
            most: Tokens that it may have: of a longer one as little is looked at as can be.

        Raises:
            RequestRejected: it cannot be encoded, or has more tokens.
        """
        return self._maker.encoder.encode(prompt, most)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens that begin a text; may be called in a thread.

        Raises:
            RequestRejected: one is beyond the model's vocabulary, or its tokenizer cannot read it.
        """
        return self._maker.encoder.decode(token_ids)

    def spell(self, token_id: int) -> str:
        """Text of one token in the midst of others; empty if it has none.

        Raises:
            RequestRejected: the model's tokenizer cannot read it.
        """
        return self._maker.encoder.spell(token_id)

    def statistics(self, *, requests: bool = True) -> ClientStatistics:
        """Counts of this client; never waits. The list of `requests` is the dear part."""
        flights = self._flights
        return ClientStatistics(
            inflight=self._ledger.statistics().by_engine,
            queued=flights.queued,
            requests=flights.statistics() if requests else (),
            binding=flights.line.binding,
            unreported=flights.line.unreported,
            admission=flights.line.statistics(),
            started=flights.started,
            causes=dict(flights.causes),
            retried=flights.retried,
            resumed=flights.resumed,
            taken_back=flights.rescue.taken,
            retries_refused=flights.retries.refused,
            late_outputs=flights.late_outputs,
            sinks_failed=flights.sinks_failed,
            first_token_s=flights.first_tokens.now(),
            picks={rule: dict(ranks) for rule, ranks in flights.picks.items()},
        )

    def audit(self) -> tuple[str, ...]:
        """Every contradiction in this client's books, in words; empty when they agree."""
        flights, problems = self._flights, list(self._ledger.audit())
        charged, ended = self._ledger.statistics().inflight, flights.causes.total()
        if charged != flights.placed:
            problems.append(f"{charged} requests are charged, {flights.placed} are on engines")
        if flights.started != ended + len(flights):
            problems.append(
                f"{flights.started} requests were started, {ended} have ended, "
                f"{len(flights)} are under way"
            )
        return tuple(problems)


def _only(asked: Sequence[Asked], gives: str) -> Asked:
    """The one request that was asked for."""
    [first, *others] = asked
    if others:
        request_id = first.request.request_id
        raise RequestRejected(
            f"request {request_id}: n = {1 + len(others)} asks for several completions, "
            f"and {gives} one; use generate_many() or complete_many()",
            request_id=request_id,
        )
    return first


def _close(receivers: Iterable[OutputStream | Submission]) -> None:
    for receiver in receivers:
        receiver.close()
