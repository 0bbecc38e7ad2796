"""A server with OpenAI's routes, as a target: what it serves, and streams from it.

Prompts are token ids if the route takes them and the server tells its tokens (`/tokenize`, as
dpkit's and vLLM's do), so that their lengths are exact; else words, of which `/tokenize` says how
many make a token. Knows nothing of load.
"""

from __future__ import annotations

import difflib
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from attrs import frozen

from dpkit.bench.address import parse_url
from dpkit.bench.http import HttpClient, RequestBroken
from dpkit.bench.prompts import WORDS, PromptMaker
from dpkit.bench.record import AskFailed
from dpkit.bench.sse import BadEvent, EventReader
from dpkit.bench.target import Target
from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.bench.http import Answer
    from dpkit.bench.plan import Ask, Load
    from dpkit.bench.prompts import Prompt
    from dpkit.bench.record import Record
    from dpkit.bench.sse import Event

_NO_KEY = 401
_UNTOLD = "; --model names the model of one that does not tell"
_PATIENCE_S = 30.0
"""For what is asked before the load: a model that has been idle may take its time."""

_encode = msgspec.json.Encoder().encode


class Route(StrEnum):
    """What is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Of the route."""
        return "/v1/chat/completions" if self is Route.CHAT else "/v1/completions"


class TargetUnusable(DpkitError):  # noqa: N818 - reads as what happened
    """There is nothing to put load on: not there, or not what was asked for."""


@frozen(kw_only=True)
class Pieces:
    """What prompts consist of; see `PromptMaker`."""

    pieces: tuple[int, ...] | tuple[str, ...]
    per_token: float
    is_exact: bool
    """Whether a prompt has as many tokens as is wanted."""


class OpenAITarget(Target):
    """A model of a server; made by `open_openai`."""

    def __init__(
        self, client: HttpClient, route: Route, model: str, pieces: Pieces, load: Load
    ) -> None:
        self.name = client.address.url
        self.model = model
        self.is_exact = pieces.is_exact
        self._client = client
        self._route = route
        self._pieces = pieces
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": load.temperature,
        }
        if load.ignore_eos:  # who does not know it must not be asked
            self._fields["ignore_eos"] = True

    def prompts(self, *, seed: int, prefix: int) -> PromptMaker:
        """As `Target` says."""
        pieces = self._pieces
        return PromptMaker(
            pieces.pieces, pieces_per_token=pieces.per_token, seed=seed, prefix=prefix
        )

    async def ask(self, ask: Ask, record: Record) -> None:
        """As `Target` says."""
        taker = _Taker(record)
        try:
            answer = await self._client.request(
                "POST",
                self._route.path,
                self.body(ask.prompt, ask.max_tokens),
                on_piece=taker.take,
            )
        except RequestBroken as error:
            raise AskFailed(error.kind, str(error)) from error
        except BadEvent as error:
            raise AskFailed("bad answer", str(error)) from error
        record.engine = answer.headers.get("x-dpkit-engine")
        if answer.status != 200:
            raise AskFailed(f"HTTP {answer.status}", _said(answer))
        taker.check()

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """Of a request."""
        if self._route is Route.CHAT:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]}
        else:
            asked = {"prompt": prompt.text if prompt.ids is None else prompt.ids}
        return _encode(self._fields | asked | {"max_tokens": max_tokens})


class _Taker:
    """Writes the events of one answer into its record, as they come."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._reader = EventReader()
        self._error: str | None = None

    def take(self, data: bytes) -> None:
        now = trio.current_time()
        for event in self._reader.feed(data):
            self._take(event, now)

    def _take(self, event: Event, now: float) -> None:
        record = self._record
        for choice in event.choices:
            if choice.has_token:
                record.moments.append(now)
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
        if event.error is not None:
            self._error = _message(event.error)

    def check(self) -> None:
        """The answer is over: is it whole?"""
        if self._error is not None:
            raise AskFailed("error in the stream", self._error)
        if not self._reader.is_done:
            raise AskFailed("bad answer", "the answer is no stream that ends with [DONE]")
        if not self._record.output_tokens:
            self._record.output_tokens = len(self._record.moments)


@asynccontextmanager
async def open_openai(
    url: str, *, route: Route, model: str | None, api_key: str | None, load: Load
) -> AsyncIterator[OpenAITarget]:
    """Look at a server and make a target of it.

    Args:
        url: As `parse_url` takes it.
        route: What is asked.
        model: None: the first one that the server has.
        api_key: For ``Authorization``.
        load: What is to be said with every request.

    Raises:
        BadAddress: the URL is wrong.
        TargetUnusable: nobody answers there, or there is no such model or route.

    Resource handling:
        Connections are closed when the block is left.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    client = HttpClient(parse_url(url), headers)
    try:
        name = await _find_model(client, model)
        pieces = await _find_pieces(client, route, name)
        target = OpenAITarget(client, route, name, pieces, load)
        await _try(client, target, route)
        yield target
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await client.close()


async def _call(client: HttpClient, method: str, path: str, body: bytes = b"") -> Answer:
    url = f"{client.address.url}: {method} {path}"
    try:
        with trio.fail_after(_PATIENCE_S):
            return await client.request(method, path, body)
    except trio.TooSlowError:
        raise TargetUnusable(f"{url}: no answer within {_PATIENCE_S:g} s") from None
    except RequestBroken as error:
        hint = "; is the server up, and is --url its address?" * (error.kind == "unreachable")
        raise TargetUnusable(f"{url}: {error}{hint}") from error


async def _find_model(client: HttpClient, model: str | None) -> str:
    answer = await _call(client, "GET", "/v1/models")
    names = _names(answer)
    if model is None and not names:
        raise TargetUnusable(
            f"{client.address.url}: GET /v1/models: {answer.status}: {_said(answer)}{_hint(answer)}"
            f"{'' if answer.status == _NO_KEY else _UNTOLD}"
        )
    if model is None:
        return names[0]
    if names and model not in names:
        near = difflib.get_close_matches(model, names, n=1) or names[:5]
        raise TargetUnusable(
            f"{client.address.url}: there is no model {model!r}; there is {', '.join(near)}"
        )
    return model


def _names(answer: Answer) -> list[str]:
    try:
        return [str(each["id"]) for each in msgspec.json.decode(answer.body)["data"]]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []


async def _find_pieces(client: HttpClient, route: Route, model: str) -> Pieces:
    """Ask what words are in tokens; who does not know is taken to have a token a word."""
    text = " ".join(WORDS)
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await _call(client, "POST", "/tokenize", _encode(asked))
    try:
        ids = [int(token) for token in msgspec.json.decode(answer.body)["tokens"]]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        ids = []
    if route is Route.COMPLETIONS and len(set(ids)) > 1:
        return Pieces(pieces=tuple(sorted(set(ids))), per_token=1.0, is_exact=True)
    per_token = len(WORDS) / len(ids) if ids else 1.0
    return Pieces(pieces=WORDS, per_token=per_token, is_exact=False)


async def _try(client: HttpClient, target: OpenAITarget, route: Route) -> None:
    """One token, so that what is wrong with all requests is said once, before the load."""
    maker = target.prompts(seed=0, prefix=0)
    answer = await _call(client, "POST", route.path, target.body(maker.make(8), 1))
    if answer.status != 200:
        hint = _hint(answer) if answer.status in {_NO_KEY, 404} else ""
        raise TargetUnusable(
            f"{target.name}: POST {route.path}: {answer.status}: {_said(answer)}{hint}"
        )


def _hint(answer: Answer) -> str:
    """What to try about an answer that is no good one."""
    if answer.status == _NO_KEY:
        return "; --api-key-env names a variable that holds a key it takes"
    return "; is --url the address of an OpenAI-compatible server, without the path of a route?"


def _said(answer: Answer) -> str:
    """What the body of an answer that is no good says, in a line."""
    try:
        body = msgspec.json.decode(answer.body)
        return _message(body.get("error", body))
    except (msgspec.MsgspecError, AttributeError):
        text = " ".join(answer.body[:200].decode(errors="replace").split())
        return text or "no word of explanation"


def _message(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())
