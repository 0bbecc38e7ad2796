"""One request for generated text, from its body to its last byte: ``/v1/completions`` and chats.

Owns the submissions of its request: however it ends, they are closed, so that no engine works for a
client that has gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import trio

from dpkit.errors import RequestRejected
from dpkit.logs import ENGINE
from dpkit.serve.answers import Streamed, Whole
from dpkit.serve.chunks import Form, Kind
from dpkit.serve.errors import bad_request, cut_off
from dpkit.serve.face import Ending
from dpkit.serve.front import Generated
from dpkit.serve.requests import read_chat, read_completion
from dpkit.serve.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpkit.messages import EngineId
    from dpkit.nursery.prompts import Prompt
    from dpkit.serve.answers import Answer
    from dpkit.serve.face import Headers, Request, Responder
    from dpkit.serve.front import Front
    from dpkit.serve.requests import Order

T = TypeVar("T")

_AT_ONCE = 256 * 1024
"""Bytes of a body that are parsed here and now: about a millisecond."""
_BETWEEN = 16
"""Prompts that are submitted between two checkpoints."""


async def complete(front: Front, request: Request, responder: Responder) -> None:
    """Answer ``/v1/completions``."""
    order = await read(read_completion, request.body, front.check_model, front.longest_prompt)
    await _generate(front, request, responder, order, Kind.COMPLETION)


async def chat(front: Front, request: Request, responder: Responder) -> None:
    """Answer ``/v1/chat/completions``."""
    order = await read(read_chat, request.body, front.check_model)
    await _generate(front, request, responder, order, Kind.CHAT)


async def read(reader: Callable[..., T], body: bytes, *more: Any) -> T:
    """Call a reader of bodies; with a long one in a thread."""
    if len(body) <= _AT_ONCE:
        return reader(body, *more)
    return await in_thread(reader, body, *more)


async def _generate(
    front: Front, request: Request, responder: Responder, order: Order, kind: Kind
) -> None:
    received_at = trio.current_time()
    name = front.name(f"{kind}-{request.id}")
    form = Form(kind=kind, id=name, model=front.model, usage=order.usage)
    answer = (Streamed if order.stream else Whole)(
        responder,
        order=order,
        form=form,
        spelling=front.spelling,
        headers=_headers_for(request),
        longest=front.cluster.longest,
    )
    try:
        await _submit(front, request, order, answer)
        await answer.done.wait()
    except trio.Cancelled:
        if responder.ending is Ending.SHUTDOWN:
            answer.fail(cut_off(answer.usage.completion))
        raise
    except RequestRejected as error:  # for its size, perhaps, and an answer knows by which field
        answer.fail(error)
    except Exception as error:
        answer.error = error
        raise
    finally:
        answer.close()
        front.forget(name)
        ENGINE.set(_names(answer) or None)
        front.tell(_generated(request, responder, answer, received_at))
        answer.let_go()


async def _submit(front: Front, request: Request, order: Order, answer: Answer) -> None:
    """Send a request to the engines for each choice of each prompt."""
    tenant, pin = front.api_keys.check(request), front.pinned(request)
    client = front.cluster.client
    most = front.longest_prompt
    prompts = [await front.encode(prompt, most) for prompt in order.prompts]
    if not all(prompts):
        raise bad_request("a prompt is empty; give at least one token", "prompt")
    for number, (prompt, token_ids) in enumerate(zip(order.prompts, prompts, strict=True)):
        text = await _text(front, prompt, token_ids) if order.echo else ""
        choices = answer.add(token_ids, text)
        submissions = client.submit_many(
            token_ids,
            order.sampling_for(len(token_ids), answer.longest),
            sinks=choices,
            request_id=answer.form.id if len(prompts) == 1 else f"{answer.form.id}-{number}",
            engine=pin,
            priority=order.priority,
            cache_salt=order.cache_salt,
            timeout=order.timeout,
            tenant=tenant,
        )
        for choice, submission in zip(choices, submissions, strict=True):
            choice.submission = submission
        if number % _BETWEEN == _BETWEEN - 1:
            await trio.lowlevel.checkpoint()


async def _text(front: Front, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
    return prompt if isinstance(prompt, str) else await front.decode(token_ids)


def _headers_for(request: Request) -> Callable[[Answer], Headers]:
    explain = (request.header("x-dpkit-explain") or "") not in {"", "0"}

    def headers(answer: Answer) -> Headers:
        made = [(b"x-dpkit-engine", _names(answer).encode())]
        if explain:
            reasons = "; ".join(dict.fromkeys(_reasons(answer)))
            made.append((b"x-dpkit-pick", reasons.encode("ascii", "replace")))
        return made

    return headers


def _names(answer: Answer) -> str:
    return ", ".join(map(str, _engines(answer)))


def _engines(answer: Answer) -> tuple[EngineId, ...]:
    submissions = [choice.submission for choice in answer.choices]
    engines = [each.engine for each in submissions if each is not None]
    return tuple(dict.fromkeys(engine for engine in engines if engine is not None))


def _places(answer: Answer) -> Iterator[float]:
    for choice in answer.choices:
        if choice.submission is not None and choice.submission.placed_at is not None:
            yield choice.submission.placed_at


def _reasons(answer: Answer) -> Iterator[str]:
    for choice in answer.choices:
        if choice.submission is not None and choice.submission.placement is not None:
            yield str(choice.submission.placement.reason)


def _generated(
    request: Request, responder: Responder, answer: Answer, received_at: float
) -> Generated:
    order, usage = answer.order, answer.usage
    return Generated(
        request=request,
        id=answer.form.id,
        model=answer.form.model,
        sampling=order.sampling,
        n=order.n,
        engines=_engines(answer),
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        output_tokens=usage.completion,
        max_tokens=order.max_tokens,
        choices=len(answer.choices),
        finish_reasons=tuple(choice.finish_reason for choice in answer.choices),
        streamed=order.stream,
        error=answer.error,
        ending=responder.ending,
        received_at=received_at,
        placed_at=min(_places(answer), default=None),
        first_token_at=answer.began_at,
        ended_at=trio.current_time(),
    )
