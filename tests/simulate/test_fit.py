"""Fits: constants that made the steps are found again, and what cannot be fitted is told."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from dpkit.config.load import load_config, parse_config
from dpkit.costmodel import PRESETS, StepCost, parse_preset
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ConfigError, ModelNotFound, ModelUnsupported
from dpkit.simulate.fit import Step, fit_steps, predicted
from dpkit.simulate.fit_log import Served, fit_run
from dpkit.simulate.readings import preset_text, read_measured
from dpkit.simulate.squares import non_negative

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRUE = StepCost(a_ms=8.0, b_us=20.0, c_us=5.0, d_ns=40.0, q_ns=1.0, a2_ms=3.0, d2_ns=30.0)
MIXED = StepCost(
    a_ms=3.0, e_ms=10.0, a2_ms=15.0, b_us=9.0, c_us=20.0, d_ns=30.0, q_ns=0.2, experts=(8, 128)
)


def _steps(cost: StepCost, noise: float = 0.0) -> list[Step]:
    rng = random.Random(1)
    grid = [(tokens, 0, 0) for tokens in (128, 512, 1024, 4096, 8192)]
    grid += [(1024, context, 0) for context in (1_000, 8_000, 64_000)]
    grid += [(0, n, n * each) for n in (1, 4, 16, 64, 256) for each in (128, 1_024, 8_192)]
    grid += [(tokens, n, n * 1_024) for tokens in (64, 512, 2_048) for n in (8, 64)]
    steps = []
    for number, (tokens, second, third) in enumerate(grid):
        is_prefill = 5 <= number < 8
        step = Step(
            prefill_tokens=tokens,
            prefill_context=second if is_prefill else 0,
            decodes=0 if is_prefill else second,
            kv_tokens=third,
            seconds=1.0,
        )
        seconds = predicted(cost, step) * (1 + rng.uniform(-noise, noise))
        steps.append(
            Step(
                prefill_tokens=step.prefill_tokens,
                prefill_context=step.prefill_context,
                decodes=step.decodes,
                kv_tokens=step.kv_tokens,
                seconds=seconds,
            )
        )
    return steps


@pytest.mark.parametrize("cost", [TRUE, MIXED])
def test_constants_that_made_the_steps_are_found_again(cost: StepCost) -> None:
    fit = fit_steps(_steps(cost), experts=cost.experts)
    assert fit.mean_error < 0.005
    for name in ("a_ms", "b_us", "d_ns", "q_ns"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(cost, name), rel=0.05), name


def test_a_fit_tells_how_far_off_it_is() -> None:
    fit = fit_steps(_steps(TRUE, noise=0.2))
    assert 0.03 < fit.mean_error < 0.15
    assert fit.mean_error < fit.p95_error
    assert fit.points == len(_steps(TRUE))


@pytest.mark.parametrize("cost", [TRUE, MIXED])
def test_a_table_of_all_kinds_of_steps_tells_every_constant(cost: StepCost) -> None:
    assert fit_steps(_steps(cost), experts=cost.experts).untold == ()


@pytest.mark.parametrize(
    ("kept", "untold"),
    [
        (lambda step: not step.decodes, ("a_ms", "c_us", "d_ns")),
        (lambda step: not step.prefill_tokens, ("b_us", "q_ns")),
        (lambda step: step.kv_tokens == 128 * step.decodes, ("c_us", "d_ns")),
    ],
    ids=["no decodes", "no prefills", "contexts of one length"],
)
def test_a_fit_names_the_constants_that_nothing_tells(
    kept: Callable[[Step], bool], untold: tuple[str, ...]
) -> None:
    assert fit_steps([step for step in _steps(TRUE) if kept(step)]).untold == untold


LINEAR = StepCost(a_ms=6.0, a2_ms=6.0, b_us=20.0, c_us=10.0, d_ns=20.0, q_ns=0.0)
H100 = PRESETS["h100-8b"].cost


def _busy(cost: StepCost, rng: random.Random, *, prompts: tuple[int, ...]) -> list[Step]:
    """Steps of a server on which something is always decoding."""
    steps = []
    for _ in range(200):
        tokens, decodes = rng.choice(prompts), rng.randint(1, 64)
        step = Step(
            prefill_tokens=tokens,
            prefill_context=rng.choice([0, 500, 3_000]) if tokens else 0,
            decodes=decodes,
            kv_tokens=decodes * rng.randint(100, 2_000),
            seconds=1.0,
        )
        steps.append(evolve(step, seconds=predicted(cost, step)))
    return steps


@pytest.mark.parametrize("cost", [LINEAR, H100], ids=["linear", "h100-8b"])
@pytest.mark.parametrize("lone", [0, 2])
def test_a_table_of_a_busy_server_needs_no_step_of_prefills_alone(
    cost: StepCost, lone: int
) -> None:
    steps = _busy(cost, random.Random(1), prompts=(0, 256, 512, 1024))
    for tokens in (4_096, 8_192)[:lone]:
        step = Step(prefill_tokens=tokens, prefill_context=0, decodes=0, kv_tokens=0, seconds=1.0)
        steps.append(evolve(step, seconds=predicted(cost, step)))
    fit = fit_steps(steps)
    assert fit.mean_error < 1e-6
    for name in ("a_ms", "a2_ms", "b_us", "c_us", "d_ns", "q_ns"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(cost, name), abs=0.01), name


def test_a_long_table_is_fitted_from_a_sample_of_starts_to_all_of_its_steps() -> None:
    rng = random.Random(2)
    steps = [step for _ in range(10) for step in _busy(H100, rng, prompts=(0, 16, 256, 1024))]
    fit = fit_steps(steps)
    assert fit.points == 2_000
    assert fit.mean_error < 1e-6


def test_steps_too_short_to_be_bound_by_arithmetic_do_not_tell_what_a_token_costs() -> None:
    steps = _busy(H100, random.Random(3), prompts=(0, 16, 64))
    assert fit_steps(steps).mean_error < 1e-6
    assert "b_us" in fit_steps(steps).untold


def _one_after_the_other(
    *, lengths: tuple[int, ...] = (50, 100, 400, 900, 1500, 2000), idle_s: float = 0.0
) -> list[Served]:
    """Requests of which none meets another: prefills of 5 + 0.02p ms, steps of 6 ms and 20 ns."""
    rng, now, served = random.Random(4), 0.0, []
    for number in range(60):
        tokens, answer = lengths[number % len(lengths)], rng.randint(2, 60)
        first = now + idle_s + max(6e-3, 5e-3 + 20e-6 * tokens)
        steps = answer - 1
        last = first + steps * 6e-3 + 20e-9 * steps * (tokens + answer / 2)
        served.append(
            Served(
                prompt_tokens=tokens,
                output_tokens=answer,
                scheduled_s=now,
                first_s=first,
                last_s=last,
            )
        )
        now = last
    return served


def test_requests_that_were_alone_tell_what_a_prefill_costs() -> None:
    fit = fit_run(_one_after_the_other())
    assert fit.of == "60 decoding times and 59 lone prefills"
    assert fit.mean_error < 1e-3
    assert not {"b_us", "q_ns"} & set(fit.untold)
    for tokens in (20, 100, 1_000, 2_000):
        step = Step(prefill_tokens=tokens, prefill_context=0, decodes=0, kv_tokens=0, seconds=1.0)
        assert predicted(fit.cost, step) == pytest.approx(
            max(6e-3, 5e-3 + 20e-6 * tokens), rel=0.01
        )


def test_lone_prefills_of_one_length_do_not_tell_what_a_token_costs() -> None:
    assert {"b_us", "q_ns"} <= set(fit_run(_one_after_the_other(lengths=(500,))).untold)


def test_lone_prefills_that_waited_for_something_else_leave_decodes_as_they_are() -> None:
    fit = fit_run(_one_after_the_other(idle_s=0.05))
    assert fit.mean_error > 0.05
    step = Step(prefill_tokens=0, prefill_context=0, decodes=1, kv_tokens=1_000, seconds=1.0)
    assert predicted(fit.cost, step) == pytest.approx(6.02e-3, rel=0.01)


def test_a_request_that_met_another_and_the_first_of_a_log_are_no_lone_prefills() -> None:
    def served(at: float) -> Served:
        return Served(
            prompt_tokens=100, output_tokens=9, scheduled_s=at, first_s=at + 1, last_s=at + 2
        )

    alone = [served(0.0), served(10.0), served(20.0)]
    assert fit_run(alone).of == "3 decoding times and 2 lone prefills"
    assert fit_run([*alone, served(10.5)]).of == "4 decoding times and 1 lone prefills"
    assert fit_run([*alone, served(18.5)]).of == "4 decoding times and 2 lone prefills"
    assert fit_run([served(0.0), served(1.5)]).of == "2 decoding times"


def test_a_log_of_lone_requests_does_not_tell_what_others_cost() -> None:
    served = [
        Served(
            prompt_tokens=9, output_tokens=n, scheduled_s=9.0 * n, first_s=9.0 * n, last_s=10.0 * n
        )
        for n in (2, 3, 4)
    ]
    assert {"b_us", "q_ns"} <= set(fit_run(served).untold)


def test_a_part_that_is_known_is_left_out_of_the_factors() -> None:
    rows = [((x,), 10.0 + 3.0 * x) for x in (1.0, 2.0, 3.0)]
    assert non_negative(rows, 1, [10.0] * 3) == pytest.approx([3.0])


def test_no_constant_is_negative() -> None:
    rows = [((1.0, x), 10.0 - x) for x in (1.0, 2.0, 3.0)]
    factors = non_negative(rows, 2)
    assert min(factors) >= 0.0
    assert factors[1] == 0.0


def test_a_log_of_requests_tells_the_steps_between_its_lines() -> None:
    step_s = 0.02
    served = [
        Served(
            prompt_tokens=100,
            output_tokens=101,
            scheduled_s=10.0 * n,
            first_s=10.0 * n + 0.05,
            last_s=10.0 * n + 0.05 + 100 * step_s,
        )
        for n in range(5)
    ]
    fit = fit_run(served)
    assert fit.mean_error < 0.01
    step = Step(prefill_tokens=0, prefill_context=0, decodes=1, kv_tokens=150, seconds=step_s)
    assert predicted(fit.cost, step) == pytest.approx(step_s, rel=0.02)


def test_without_anything_to_fit_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="there are no steps to fit"):
        fit_steps([])
    with pytest.raises(ValueError, match="no request has the two tokens from which a step can"):
        fit_run([])


def test_a_fit_becomes_a_file_that_a_config_names(tmp_path: Path) -> None:
    fit = fit_steps(_steps(TRUE), host_ms=1.5)
    path = tmp_path / "mine.toml"
    path.write_text(preset_text(fit, source=r'of "é\1".csv', kv_tokens=300_000))
    model = CostModel(str(path))
    assert model.spec.kv_tokens == 300_000
    assert model.cost.host_ms == 1.5
    assert model.cost.a_ms == pytest.approx(fit.cost.a_ms, rel=1e-3)
    config = tmp_path / "dpkit.toml"
    config.write_text('[[engines]]\nmodel = "cost:mine.toml"\n')
    assert load_config(config).engines[0].model == f"cost:{path}"


def test_every_built_in_preset_can_be_written_and_read() -> None:
    for preset in PRESETS.values():
        names = ("a_ms", "b_us", "c_us", "d_ns", "q_ns", "a2_ms", "e_ms", "host_ms", "d2_ns")
        text = "\n".join(f"{name} = {getattr(preset.cost, name)}" for name in names)
        text += f"\nexperts = {list(preset.cost.experts)}\nkv_tokens = {preset.kv_tokens}\n"
        assert parse_preset(text).cost == preset.cost


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a_ms = 1\n", "a preset needs b_us; it may be 0"),
        ('a_ms = "x"\n', "a_ms must be a number from 0 on, not 'x'"),
        ("speed = 1\n", "there is no key 'speed' in a preset; there are: a2_ms, a_ms"),
        ("a_ms = -1\nb_us = 1\nc_us = 1\nd_ns = 1\nq_ns = 1\n", "a_ms must be a number from 0 on"),
        (
            "a_ms = 1\nb_us = 1\nc_us = 1\nd_ns = 1\nq_ns = 1\nexperts = [9, 8]\n",
            "experts must be [K, E], such as [8, 128], not [9, 8]",
        ),
    ],
)
def test_what_is_no_preset_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ModelUnsupported) as caught:
        CostModel(str(path))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"cost preset {str(path)!r}: ")


def test_a_preset_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.toml' cannot be read: .* `dpkit fit` makes"):
        CostModel(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml' does not exist"):
        parse_config('[[engines]]\nmodel = "cost:none.toml"\n')
    with pytest.raises(ConfigError, match=r"~nobody-here/x\.toml' does not exist"):
        parse_config('[[engines]]\nmodel = "cost:~nobody-here/x.toml"\n')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival_s,prompt_tokens\n", ":1: nothing to fit here: expected a table of steps, with"),
        (
            "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms\n1,0,0,0,fast\n",
            ":2: this was not measured: step_ms must be a number, not 'fast'",
        ),
        (
            "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms\n1,0,0,0,nan\n",
            "step_ms must be more than 0, not nan",
        ),
        (
            "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms\n",
            "some.csv: nothing was measured: there is a header, and no line after it",
        ),
        (
            "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms\n1,0,0,0,0\n",
            "step_ms must be more than 0, not 0",
        ),
    ],
)
def test_what_was_not_measured_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "some.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_measured(path)
    assert words in str(caught.value)
