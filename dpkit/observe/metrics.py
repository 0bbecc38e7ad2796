"""The route ``/metrics``: a look at everything in one step, its text in turns with all others.

::

    metrics = Metrics(cluster)
    service = await nursery.start(partial(serve_http, cluster, metrics=metrics))
    metrics.watch(service.front)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.names import EngineState
from dpkit.nursery.handout import TURN_S
from dpkit.observe.catalogue import ALIASES, FAMILIES
from dpkit.observe.numbers import ClusterNumbers, Numbers
from dpkit.observe.render import Page, negotiate, process_registry
from dpkit.observe.rows import rows_of
from dpkit.observe.silence import Silence
from dpkit.observe.tallies import HttpTally, RequestTallies
from dpkit.serve.routes import ADMIN, API, Access, Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.events import Event
    from dpkit.observe.render import Encode
    from dpkit.serve.face import Request, Responder
    from dpkit.serve.front import Front


class Metrics:
    """All metrics of one cluster and one server; a `dpkit.serve.face.Handler`.

    Requests are counted from `use` on, answers from `watch` on, each once and for as long as this
    lives. A scrape costs the loop one pass over the engines, and then their text, in turns.

    Args:
        cluster: As for `use`; None: it is not up yet.
        model_name: The label of the same name; None: what the watched server calls the model, or
            else the config.
        legacy_aliases: Whether to tell older names of vLLM's metrics too.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        model_name: str | None = None,
        legacy_aliases: bool = True,
    ) -> None:
        self._model_name = model_name
        self._legacy_aliases = legacy_aliases
        self._cluster: Cluster | None = None
        self._silence: Silence | None = None
        self._front: Front | None = None
        self._requests = RequestTallies()
        self._http: HttpTally | None = None
        self._process = process_registry()
        self._pages: dict[Encode, Page] = {}
        self._loop_lag_s = 0.0
        if cluster is not None:
            self.use(cluster)

    def __repr__(self) -> str:
        return f"<Metrics of {self._cluster!r}, {self._front!r}>"

    def use(self, cluster: Cluster) -> None:
        """Tell of a cluster from now on; once."""
        self._cluster = cluster
        self._silence = Silence(cluster.tells_load)
        cluster.events.observers.append(self._on_event)

    def watch(self, front: Front) -> None:
        """Tell of a server's answers from now on; once."""
        self._front = front
        router = Router(front, API + ADMIN)
        probes = (route.path for route in router.routes if route.access is Access.OPEN)
        self._http = HttpTally(router.name_of, frozenset(probes))
        front.http_observers.append(self._http.on_answered)

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answer a scrape."""
        content_type, text = await self.scrape(request.header("accept") or "")
        responder.respond(200, ((b"content-type", content_type.encode("latin-1")),), text)
        # For the next one: this one need not wait for it.
        began = trio.current_time()
        await trio.lowlevel.checkpoint()
        self._loop_lag_s = trio.current_time() - began

    async def scrape(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and text of all metrics; `accept` may ask for OpenMetrics.

        A checkpoint only where it takes long, as with many engines.
        """
        content_type, pieces = self._pieces(accept)
        text, since = [], trio.current_time()
        for piece in pieces:
            text.append(piece)
            if trio.current_time() - since > TURN_S:
                await trio.lowlevel.checkpoint()
                since = trio.current_time()
        return content_type, "".join(text).encode()

    def _pieces(self, accept: str) -> tuple[str, Iterator[str]]:
        encode, content_type = negotiate(accept)
        if (page := self._pages.get(encode)) is None:
            families = [each for each in FAMILIES if self._legacy_aliases or each not in ALIASES]
            page = self._pages[encode] = Page(families, self._process, encode)
        return content_type, page.pieces(rows_of(self.numbers()))

    def numbers(self) -> Numbers:
        """All numbers now; never waits."""
        front, cluster = self._front, self._cluster
        return Numbers(
            loop_lag_s=self._loop_lag_s,
            server=None if front is None else front.state,
            http=None if self._http is None else self._http.now(),
            cluster=None if cluster is None else self._look(cluster),
        )

    def _look(self, cluster: Cluster) -> ClusterNumbers:
        now, statistics = trio.current_time(), cluster.statistics(requests=False)
        engines = (*statistics.engines, *statistics.leaving)
        ready = {each.engine for each in engines if each.state is EngineState.READY}
        silence = self._silence
        assert silence is not None  # noqa: S101 - they come together
        return ClusterNumbers(
            model_name=self._name(cluster),
            now=now,
            statistics=statistics,
            requests=self._requests.now(str(each.rank) for each in engines),
            silent=silence.count(ready, now),
        )

    def _name(self, cluster: Cluster) -> str:
        if self._model_name is None:
            told = None if self._front is None else self._front.settings.model_name
            self._model_name = told or cluster.config.engines[0].model
        return self._model_name

    def _on_event(self, event: Event) -> None:
        self._requests.on_event(event)
        if event.figures is not None and event.engine is not None and self._silence is not None:
            self._silence.on_served(event.engine, event.at)
