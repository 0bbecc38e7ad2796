"""A cluster of this process, as a target: through its client, without HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.bench.prompts import WORDS, PromptMaker
from dpkit.bench.record import AskFailed
from dpkit.bench.target import Target
from dpkit.errors import DpkitError, describe
from dpkit.messages import SamplingParams

if TYPE_CHECKING:
    from dpkit.bench.plan import Ask, Load
    from dpkit.bench.record import Record
    from dpkit.messages import EngineOutput
    from dpkit.nursery.cluster import Cluster


class ClusterTarget(Target):
    """A cluster that is open.

    Args:
        cluster: Answers; its owner closes it.
        name: Where it comes from, for the report.
        load: How requests sample.
    """

    def __init__(self, cluster: Cluster, name: str, load: Load) -> None:
        self.name = name
        self.is_exact = True
        self.model = ", ".join(dict.fromkeys(group.model for group in cluster.config.engines))
        self._client = cluster.client
        self._load = load

    def prompts(self, *, seed: int, prefix: int) -> PromptMaker:
        """As `Target` says."""
        ids = sorted(set(self._client.encode(" ".join(WORDS))))
        return PromptMaker(ids, seed=seed, prefix=prefix)

    async def ask(self, ask: Ask, record: Record) -> None:
        """As `Target` says."""
        ended = trio.Event()
        last: list[EngineOutput] = []

        def sink(output: EngineOutput) -> None:
            if output.token_ids:
                record.moments.append(trio.current_time())
                record.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                last.append(output)
                ended.set()

        sampling = SamplingParams(
            max_tokens=ask.max_tokens,
            temperature=self._load.temperature,
            ignore_eos=self._load.ignore_eos,
        )
        try:
            submission = self._client.submit(ask.prompt.ids or (), sampling, sink=sink)
        except DpkitError as error:
            raise AskFailed(type(error).__name__, str(error)) from error
        try:
            await ended.wait()
        finally:
            record.engine = submission.engine.name if submission.engine is not None else None
            submission.close()
        failure = last[0].error
        if failure is not None:
            raise AskFailed(type(failure).__name__, describe(failure)) from failure
