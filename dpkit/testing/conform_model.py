"""`check_model`: what an engine relies on in a model.

Drives real engine cores, without Trio: prompts cut into chunks, requests side by side, preempted,
cached and interleaved with another engine's must all get the text that each gets alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attrs import evolve

from dpkit.engine.limits import EngineLimits
from dpkit.messages import GenerateRequest, ModelSpec, SamplingParams
from dpkit.testing.bench import Bench
from dpkit.testing.rules import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.abc import Model

PROMPTS = ("The first of all", "second", "A third one, the longest of all the prompts here", "4")
TOKENS = 12
STEP_LIMIT_S = 120.0
"""A step that takes longer counts as hung: the default of ``supervision.step_timeout``."""


def check_model(make_model: Callable[[], Model], *, step_limit_s: float = STEP_LIMIT_S) -> None:
    """Check a model against the contract of `dpkit.abc.Model`.

    Args:
        make_model: Makes one; its class will do if that takes no arguments.
        step_limit_s: A step whose `duration_s` is longer breaks a rule.

    Error handling:
        Nonconforming: the first rule that is broken.
    """
    model = make_model()
    subject = Subject(f"model {type(model).__qualname__}")
    subject.demand("spec tells sizes", isinstance(model.spec, ModelSpec), f"spec is {model.spec!r}")
    prompts = _check_tokenizer(subject, model)
    asks = [_ask(number, prompt) for number, prompt in enumerate(prompts)]
    roomy = _limits(model)
    alone = {ask.request_id: _serve(subject, model, [ask], roomy)[ask.request_id] for ask in asks}
    ways = {
        "batched requests get the text each gets alone": roomy,
        "prompts cut into chunks give the same text": evolve(roomy, max_num_batched_tokens=5),
        "preempted requests give the same text": evolve(roomy, num_blocks=_tightest(asks)),
        "cached prefixes give the same text": evolve(roomy, prefix_cache=True),
    }
    for rule, limits in ways.items():
        # Twice the same requests: the second time with what the first left in the cache.
        again = [evolve(ask, request_id=f"{ask.request_id} again") for ask in asks]
        texts = _serve(subject, model, [*asks, *again], limits)
        for ask in asks:
            for request_id in (ask.request_id, f"{ask.request_id} again"):
                got, expected = texts[request_id], alone[ask.request_id]
                subject.demand(rule, got == expected, f"{got}, alone {expected}")
    _check_engines_apart(subject, model, asks, alone)
    _check_min_tokens(subject, model, asks[0])
    _check_logprobs(subject, model, asks[0])
    _check_seeds(subject, model, asks[0])
    _check_durations(subject, model, asks, step_limit_s)


def _check_tokenizer(subject: Subject, model: Model) -> list[list[int]]:
    """Check that text survives the way to tokens and back; returns the prompts' tokens."""
    rule = "the tokenizer gives token ids of the spec's vocabulary, and the text back"
    encoded = []
    with subject.must(rule):
        tokenizer = model.tokenizer()
        for text in PROMPTS:
            token_ids = tokenizer.encode(text)
            inside = all(0 <= each < model.spec.vocab_size for each in token_ids)
            subject.demand(rule, token_ids and inside, f"{text!r} became {token_ids}")
            decoder = tokenizer.decoder()
            back = decoder.feed(token_ids) + decoder.finish()
            subject.demand(rule, text in back, f"{text!r} came back as {back!r}")
            encoded.append(list(token_ids))
    return encoded


def _ask(number: int, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
    )


def _limits(model: Model) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=4,
        num_blocks=256,
        prefix_cache=False,
        max_model_len=model.spec.max_model_len,
    )


def _tightest(asks: Sequence[GenerateRequest]) -> int:
    """Blocks of four tokens with which the longest request just fits."""
    return math.ceil(max(len(ask.prompt_token_ids) for ask in asks) / 4) + math.ceil(TOKENS / 4)


def _serve(
    subject: Subject, model: Model, asks: Sequence[GenerateRequest], limits: EngineLimits
) -> dict[str, tuple[int, ...]]:
    return Bench(subject, model, limits).run(asks)


def _check_engines_apart(
    subject: Subject,
    model: Model,
    asks: Sequence[GenerateRequest],
    alone: dict[str, tuple[int, ...]],
) -> None:
    """Two engines take turns with one model: what is of an engine lives in its cache."""
    engines = [Bench(subject, model, _limits(model)) for _ in range(2)]
    for engine, share in zip(engines, (asks, asks[::-1][:2]), strict=True):
        for ask in share:
            engine.core.add(ask)
    while any(engine.core.has_requests() for engine in engines):
        for engine in engines:
            engine.step()
    for engine in engines:
        for request_id, tokens in engine.texts().items():
            subject.demand(
                "engines that share a model do not disturb each other",
                tokens == alone[request_id],
                f"{tokens}, alone {alone[request_id]}",
            )


def _check_min_tokens(subject: Subject, model: Model, ask: GenerateRequest) -> None:
    limits = _limits(model)
    sampling = evolve(ask.sampling, ignore_eos=False, min_tokens=TOKENS)
    engine = Bench(subject, model, limits)
    tokens = engine.run([evolve(ask, sampling=sampling)])[ask.request_id]
    ends = set(tokens[:-1]) & model.spec.eos_token_ids
    subject.demand("banned tokens are not sampled", not ends, f"{tokens}, of which {ends} end it")


def _check_logprobs(subject: Subject, model: Model, ask: GenerateRequest) -> None:
    if not model.spec.tells_logprobs:
        return
    engine = Bench(subject, model, _limits(model))
    engine.run([evolve(ask, sampling=evolve(ask.sampling, logprobs=2, prompt_logprobs=1))])
    outputs = engine.outputs[ask.request_id]
    told = [each for output in outputs for each in output.logprobs]
    rule = "who tells logprobs tells them for each token, and none is above 0"
    subject.demand(rule, len(told) == TOKENS, f"{len(told)} for {TOKENS} tokens")
    subject.demand(rule, all(each.logprob <= 1e-6 for each in told), f"{told}")


def _check_seeds(subject: Subject, model: Model, ask: GenerateRequest) -> None:
    sampling = evolve(ask.sampling, temperature=1.0, seed=7)
    draws = [
        _serve(subject, model, [evolve(ask, sampling=sampling)], _limits(model)) for _ in range(2)
    ]
    rule = "the same seed gives the same text"
    subject.demand(rule, draws[0] == draws[1], f"{draws[0]} and {draws[1]}")


def _check_durations(
    subject: Subject, model: Model, asks: Sequence[GenerateRequest], step_limit_s: float
) -> None:
    engine = Bench(subject, model, _limits(model))
    engine.run(asks)
    longest = max(result.duration_s for result in engine.results)
    shortest = min(result.duration_s for result in engine.results)
    subject.demand(
        "a step takes a time that can be waited for",
        0 <= shortest <= longest <= step_limit_s,
        f"steps last {shortest:g} to {longest:g} s, the limit is {step_limit_s:g} s",
    )
