"""A cluster behind its routes, served in memory: no network, and a virtual clock if you like."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.nursery.cluster import open_cluster
from dpkit.serve.front import Front
from dpkit.serve.routes import ADMIN, API, Router
from dpkit.serve.service import limits_of
from dpkit.serve.transport import CHUNK
from dpkit.testing.http import Client, open_server
from dpkit.testing.idle import check_idle
from tests.nursery.lab import STEP_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dpkit.config.schema import Config
    from dpkit.messages import Batch, StepResult
    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.front import Generated
    from dpkit.serve.http import HttpServer
    from dpkit.serve.site import Answered
    from dpkit.testing.http import Reply

ECHO = "[[engines]]\nname = 'e'\nmodel = 'echo'\ncount = 2\n"
SLOW = f"[[engines]]\nname = 'e'\nmodel = '{__name__}:Steady'\ncount = 2\n"

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Steady(EchoModel):
    """100 ms a step; says what it was told, without end if `ignore_eos`."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return evolve(super().execute(batch, cache), duration_s=STEP_S)


@define(eq=False)
class Desk:
    """Where clients come to."""

    cluster: Cluster
    front: Front
    server: HttpServer
    generated: list[Generated]
    answered: list[Answered]
    router: Router = field(init=False)

    def client(self, *, capacity: int = CHUNK) -> Client:
        """Connect."""
        return Client.of(self.server, capacity=capacity)

    async def get(self, path: str, **headers: str) -> Reply:
        """GET, from a client of its own."""
        return await self.client().request("GET", path, b"", _headers(headers))

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """POST a body as JSON; bytes as they are."""
        return await self.client().request("POST", path, dump(body), _headers(headers))

    async def ask(self, path: str, /, **fields: Any) -> Any:
        """POST, and the JSON of a good answer."""
        reply = await self.post(path, fields)
        assert reply.status == 200, reply
        return json.loads(reply.body)

    async def refused(self, path: str, /, **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST; the status, and what the error says."""
        reply = await self.post(path, fields)
        return reply.status, error_of(reply)


def error_of(reply: Reply) -> dict[str, Any]:
    """What an error says, which has all that OpenAI's have."""
    error: dict[str, Any] = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    return error


def dump(body: Any) -> bytes:
    """As it is sent."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


def events(body: bytes) -> list[Any]:
    """What a stream said: JSON as it means, and ``[DONE]``."""
    assert body.endswith(b"\n\n")
    said = []
    for event in body.decode().split("\n\n")[:-1]:
        assert event.startswith("data: ")
        data = event.removeprefix("data: ")
        said.append(data if data == "[DONE]" else json.loads(data))
    return said


def text_of(said: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    text = ""
    for event in said:
        for choice in event["choices"] if event != "[DONE]" and "choices" in event else ():
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"]["content"]
    return text


@asynccontextmanager
async def open_desk(
    config: Config | str = ECHO, *, clients: int = 1, **parts: Any
) -> AsyncIterator[Desk]:
    """Serve the cluster of a config in memory; at the end nothing may be left of any request.

    Args:
        config: A config, or TOML.
        clients: As many as the cluster has; the first is asked.
        parts: As `Front` takes them.
    """
    if isinstance(config, str):
        config = parse_config(config)
    async with open_cluster(config, clients=clients) as cluster:
        front = Front(config.server, **parts)
        front.use(cluster)
        desk = Desk(cluster, front, None, [], [])  # type: ignore[arg-type]  # a line below
        front.observers.append(desk.generated.append)
        front.http_observers.append(desk.answered.append)
        desk.router = router = Router(front, API + ADMIN if front.admin_keys else API)
        limits = limits_of(front.settings)
        async with open_server(
            router,
            quick=router.answer_nowait,
            limits=limits,
            observer=front.tell_answered,
        ) as desk.server:
            yield desk
        check_idle(cluster)
