"""The routes of OpenAI's API that say something of a model: its name, its tokens.

Those that generate text are `dpkit.serve.generation`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dpkit.errors import RequestRejected
from dpkit.serve.chunks import encode
from dpkit.serve.decoding import decode_body
from dpkit.serve.errors import api_error, bad_request
from dpkit.serve.generation import read
from dpkit.serve.heads import JSON
from dpkit.serve.messages import Message, plain_messages, read_messages
from dpkit.serve.unread import BodyReader

if TYPE_CHECKING:
    from dpkit.nursery.prompts import Prompt
    from dpkit.serve.face import Request, Responder
    from dpkit.serve.front import Front

MODELS = "/v1/models"


class TokenizeBody(msgspec.Struct):
    """Of ``/tokenize``: vLLM's. Either of the last two."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(msgspec.Struct):
    """Of ``/detokenize``: vLLM's."""

    tokens: list[int]
    model: str | None = None


async def models(front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG001
    """Answer with the one model that is here."""
    responder.respond(200, (JSON,), encode({"object": "list", "data": [_model(front)]}))


async def model(front: Front, request: Request, responder: Responder) -> None:
    """Answer with a model of which the path has the name."""
    front.check_model(request.path.removeprefix(f"{MODELS}/"))
    responder.respond(200, (JSON,), encode(_model(front)))


def _model(front: Front) -> dict[str, Any]:
    cluster = front.cluster
    return {
        "id": front.model,
        "object": "model",
        "created": front.created,
        "owned_by": "dpkit",
        "root": cluster.config.engines[0].model,
        "parent": None,
        "max_model_len": cluster.longest,
        "permission": [],
    }


async def tokenize(front: Front, request: Request, responder: Responder) -> None:
    """Answer with the token ids of a text or a conversation."""
    asked = await read(_TOKENIZE.read, request.body)
    front.check_model(asked.model)
    tokens = await front.encode(_prompt(asked))
    told = {"count": len(tokens), "max_model_len": front.cluster.longest, "tokens": tokens}
    responder.respond(200, (JSON,), encode(told))


def _prompt(asked: TokenizeBody) -> Prompt:
    if asked.messages is not None:
        return plain_messages(asked.messages)
    if asked.prompt is None:
        raise bad_request("give prompt, or messages", "prompt")
    return asked.prompt


async def detokenize(front: Front, request: Request, responder: Responder) -> None:
    """Answer with the text of token ids."""
    asked = await read(partial(decode_body, _DETOKENIZE), request.body)
    front.check_model(asked.model)
    try:
        text = await front.decode(asked.tokens)
    except RequestRejected as error:
        raise api_error(error, request.id, "tokens") from None
    responder.respond(200, (JSON,), encode({"prompt": text}))


_TOKENIZE = BodyReader(TokenizeBody, (), messages=read_messages)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
