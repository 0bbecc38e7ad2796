"""A run that serves HTTP: listening before the engines start, and to the end of the shutdown.

The phases of a stop are those of a Kubernetes pod: not ready any more, then nothing new, then what
is under way may finish, then it ends with an event that says so. Nothing is printed for a request.
"""

from __future__ import annotations

import gc
import json
import shlex
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import trio

from dpkit.cli.answers import Output
from dpkit.cli.report import Tally, json_report, table_report
from dpkit.cli.running import Running, starting
from dpkit.cli.words import say
from dpkit.errors import ClusterNotStarted
from dpkit.names import Cause
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.services import open_services
from dpkit.observe import Metrics
from dpkit.serve.bodies import log_body
from dpkit.serve.front import Front
from dpkit.serve.listeners import ListenFailed
from dpkit.serve.service import open_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from dpkit.cli.running import Options
    from dpkit.cli.signals import Signals
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.front import Generated
    from dpkit.serve.service import HttpService

_CHAT = "/v1/chat/completions"
_REACHABLE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - what is said, not bound
# Short and the same each time: left to chance, a small model may ramble to the end of its context.
_ASK = {
    "messages": [{"role": "user", "content": "Name three fruits."}],
    "temperature": 0,
    "max_tokens": 64,
}


class Serving(Running):
    """Serves until it is told to stop."""

    def __init__(self, config: Config, options: Options, signals: Signals) -> None:
        super().__init__(config, options, signals)
        self._tally = Tally()
        self._output = Output()
        self._http_ended = trio.Event()

    @property
    def has_failed(self) -> bool:
        """As `Running` says: what fails is its client's to know, and no failure of the run."""
        return False

    @property
    def was_cut_short(self) -> bool:
        """As `Running` says."""
        if self.cluster is None:
            return False
        causes = self.cluster.client.statistics().causes
        return any(causes.get(cause) for cause in (Cause.DRAIN, Cause.SHUTDOWN))

    async def serve(self) -> None:
        """Listen, bring the cluster up, serve, stop, report.

        Raises:
            ClusterNotStarted: the address cannot be had; no engine was started.
        """
        metrics = Metrics()
        front = Front(self.config.server, reload=self.reload, metrics=metrics)
        metrics.watch(front)
        front.observers.append(self._count)
        tracing = self._tracing(front)
        try:
            service = await open_service(front)
        except ListenFailed as error:
            raise ClusterNotStarted(str(error)) from error
        try:
            async with tracing, open_services(grace=0) as outer:
                # Around the cluster: probes are answered while it starts, and streams are told how
                # they end when it ends.
                outer.start_soon(self._serve_http, service, name="http")
                say(starting(self.config))
                async with open_cluster(self.config) as self.cluster:
                    metrics.use(self.cluster)
                    front.use(self.cluster)
                    self.signals.serving = True
                    with _short_pauses():
                        await self._serve(service, self.cluster)
        finally:
            # Not before clients have been told: what makes a table takes a while to be imported.
            if self.cluster is not None:
                self._report(self.cluster)

    async def _serve(self, service: HttpService, cluster: Cluster) -> None:
        async with open_services(grace=0) as services:
            services.start_soon(self.reload_on_hangup, name="reload")
            self._announce(service)
            await self._until_stopped(service, cluster)

    def _tracing(self, front: Front) -> AbstractAsyncContextManager[object]:
        server = self.config.server
        if server is None or server.otlp_traces_endpoint is None:
            return nullcontext()
        try:
            from dpkit.serve.tracing import open_tracing  # noqa: PLC0415 - where it is asked for
        except ModuleNotFoundError as error:
            raise ClusterNotStarted(
                f"server.otlp_traces_endpoint needs {error.name}; `pip install 'dpkit[otel]'` "
                "brings it"
            ) from error
        return open_tracing(front, server.otlp_traces_endpoint)

    async def _serve_http(self, service: HttpService) -> None:
        try:
            await service.run()
        finally:
            self._http_ended.set()

    async def _until_stopped(self, service: HttpService, cluster: Cluster) -> None:
        await self.signals.wait_stop(1)
        now, settings = trio.current_time(), self.config.cluster
        deadline = now + settings.finish_within
        service.front.drain()
        # Requests are still taken: whoever sends them hears of it a moment later.
        await trio.sleep(settings.pre_stop)
        service.stop(deadline)
        await self.drain(cluster, deadline)
        with trio.move_on_at(now + (settings.finish_within + settings.grace) / 2):
            await self._http_ended.wait()

    def _count(self, generated: Generated) -> None:
        if self.cluster is not None and self.cluster.config.log.prompts:
            log_body(generated)
        tally = self._tally
        tally.began(generated.received_at)
        tally.ended_at = generated.ended_at
        if generated.error is not None:
            tally.failed += 1
        elif None in generated.finish_reasons:
            tally.aborted += 1
        else:
            tally.finished += 1
            tally.output_tokens += generated.output_tokens

    def _announce(self, service: HttpService) -> None:
        """Say where it serves, and how to try it."""
        model = service.front.model
        addresses = [_url(address) for address in service.addresses]
        admin = [_url(address) for address in service.admin_addresses]
        if self.options.as_json:
            told = {"model": model, "addresses": addresses, "admin": admin}
            self._output.write(json.dumps({"serving": told}) + "\n")
            return
        lines = [f"serving {model} at {' and '.join(addresses)}", "", _curl(service), ""]
        lines += [f"admin routes at {' and '.join(admin)}"] * bool(admin)
        self._output.write("\n".join(lines) + "\n")

    def _report(self, cluster: Cluster) -> None:
        if self.options.as_json:
            self._output.write(json_report(cluster.statistics(), self._tally))
        elif self._tally.overall()["requests"]:
            self._output.write(table_report(cluster.statistics(), self._tally))


@contextmanager
def _short_pauses() -> Iterator[None]:
    """Keep the garbage collector away from modules and models: it would halt all streams for them.

    With a thousand streams, a full collection takes tens of milliseconds less.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _url(address: str) -> str:
    return address if address.startswith("unix:") else f"http://{address}"


def _curl(service: HttpService) -> str:
    """A command that asks for something, ready for a shell."""
    address, front = service.addresses[0], service.front
    words = ["curl"]
    if address.startswith("unix:"):
        words += [
            "--unix-socket",
            shlex.quote(address.removeprefix("unix:")),
            f"http://localhost{_CHAT}",
        ]
    else:
        host, _, port = address.rpartition(":")
        words.append(f"http://{_REACHABLE.get(host, host)}:{port}{_CHAT}")
    if variable := front.settings.api_key_env:
        words.append(f'-H "Authorization: Bearer ${{{variable}%%,*}}"')  # the first of several
    body = json.dumps({"model": front.model, **_ASK})
    return " ".join([*words, "-d", shlex.quote(body)])
