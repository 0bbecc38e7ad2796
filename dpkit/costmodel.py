"""What a step costs on a known GPU: a formula and the constants measured for it.

A leaf that imports nothing of dpkit: the `cost` model sleeps these times, simulations and policies
compare with them. The form and the constants are least-squares fits to public measurements: vLLM's
layers and operators on each card (LLMServingSim, AIConfigurator) and closed-loop serving points.
Each preset says which.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import tomli
from attrs import fields, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@frozen(kw_only=True)
class StepCost:
    """Constants of one model on one card, in the units in which they are published.

    A step of `n` decodes and `T` prefill tokens, `K` the sum of the decodes' contexts, takes

        touched = 1 - (1 - k/E) ** (n + T)                          of the experts; dense: 1
        weights = a + e * touched
        compute = a2 * touched + b * (n + T)
        context = d * K + q * sum(prefill tokens * their context)    with d + d2 for d where T > 0
        step    = max(weights, compute) + c * n + context + host

    The weights are read once however many tokens share them, so few tokens cost `weights` and many
    cost `compute`; a plain sum of the two overcharges small chunks by up to half. For a mixture of
    experts a2 was measured with all experts touched and is mostly the reading of them; taken whole
    it would hide e, and a lone decode would cost four times what it does.
    """

    a_ms: float  # reading the weights
    b_us: float  # arithmetic of one token
    c_us: float  # bookkeeping of one decode
    d_ns: float  # reading the KV of one token of context
    q_ns: float  # attention of one prefill token to one token of context
    a2_ms: float = 0.0  # floor of a compute-bound step
    e_ms: float = 0.0  # mixture of experts only: reading all experts
    experts: tuple[int, int] = (1, 1)  # k of E a token; the tokens of a step touch ever more
    d2_ns: float = 0.0  # beside d, in a step that also prefills: some kernels share badly
    host_ms: float = 0.0  # what the serving loop adds to the kernels

    def seconds(
        self, *, decodes: int, prefill_tokens: int, decode_context: int, prefill_context: float
    ) -> float:
        """Duration of one step.

        Args:
            decodes: Requests that compute one token after their prompt (n).
            prefill_tokens: Prompt tokens computed in this step (T).
            decode_context: Sum of the decodes' contexts, in tokens (K).
            prefill_context: Sum over the prefill tokens of the tokens each attends to.
        """
        tokens = decodes + prefill_tokens
        chosen, total = self.experts
        touched = 1.0 - (1.0 - chosen / total) ** tokens
        weights_ms = self.a_ms + self.e_ms * touched
        compute_ms = self.a2_ms * touched + self.b_us * tokens / 1e3
        d_ns = self.d_ns + self.d2_ns if prefill_tokens else self.d_ns
        context_ms = (d_ns * decode_context + self.q_ns * prefill_context) / 1e6
        bound_ms = max(weights_ms, compute_ms)
        return (bound_ms + self.c_us * decodes / 1e3 + context_ms + self.host_ms) / 1e3


@frozen(kw_only=True)
class Preset:
    """One model on one card: what its steps cost and how much it holds."""

    cost: StepCost
    kv_tokens: int  # what 90 % of the card holds beside the weights and 4 GB
    measured_by: str
    max_num_seqs: int = 256  # vLLM's default on cards of this class
    max_num_batched_tokens: int = 8192  # likewise


_KERNELS = "vLLM's operators, timed one by one (AIConfigurator)"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "h100-8b": Preset(
            cost=StepCost(a_ms=6.6, a2_ms=1.5, b_us=18.6, c_us=2.8, d_ns=47, q_ns=1.25),
            kv_tokens=450_000,
            measured_by="42 serving points, 1.5 % mean error (a2: operators)",
        ),
        "h200-8b": Preset(
            cost=StepCost(a_ms=4.6, a2_ms=1.3, b_us=18.3, c_us=9.1, d_ns=29, q_ns=0.49),
            kv_tokens=800_000,
            measured_by=_KERNELS,
        ),
        "a100-8b": Preset(
            cost=StepCost(a_ms=10.7, a2_ms=5.1, b_us=51, c_us=25, d_ns=80, q_ns=3.1),
            kv_tokens=400_000,
            measured_by=_KERNELS,
        ),
        "l40s-8b": Preset(
            cost=StepCost(a_ms=21.8, a2_ms=0.2, b_us=62, c_us=24, d_ns=198, q_ns=3.6),
            kv_tokens=180_000,
            measured_by=_KERNELS,
        ),
        "rtxpro6000-8b": Preset(
            cost=StepCost(a_ms=11.2, a2_ms=6.6, b_us=34, c_us=20, d_ns=87, q_ns=2.1, host_ms=1.5),
            kv_tokens=550_000,
            measured_by="the layers inside vLLM 0.19 (LLMServingSim); host time from a real run",
        ),
        "h100-32b": Preset(
            cost=StepCost(a_ms=24.1, a2_ms=3.8, b_us=79, c_us=19, d_ns=86, q_ns=3.2),
            kv_tokens=30_000,
            measured_by=_KERNELS,
        ),
        "h200-32b": Preset(
            cost=StepCost(a_ms=18.2, b_us=84, c_us=25, d_ns=58, q_ns=0.37),
            kv_tokens=220_000,
            measured_by=_KERNELS,
        ),
        "h200-70b-fp8": Preset(
            cost=StepCost(a_ms=19.7, b_us=94, c_us=44, d_ns=75, q_ns=0.25),
            kv_tokens=160_000,
            measured_by=_KERNELS,
        ),
        "h200-30b-a3b": Preset(
            cost=StepCost(
                a_ms=2.9,
                e_ms=10.7,
                experts=(8, 128),
                a2_ms=15.1,
                b_us=9.2,
                c_us=24,
                d_ns=28,
                q_ns=0.17,
            ),
            kv_tokens=630_000,
            measured_by=_KERNELS,
            max_num_seqs=512,
        ),
        "h100-30b-a3b": Preset(
            cost=StepCost(
                a_ms=3.2,
                e_ms=15.3,
                experts=(8, 128),
                a2_ms=20.9,
                b_us=9.2,
                c_us=29,
                d_ns=34,
                q_ns=1.2,
            ),
            kv_tokens=120_000,
            measured_by=_KERNELS,
            max_num_seqs=512,
        ),
        "h20-4b": Preset(
            cost=StepCost(a_ms=5, b_us=85, c_us=15, d_ns=45, q_ns=4),
            kv_tokens=480_000,
            measured_by="not measured: derived from peak rates",
            max_num_seqs=128,
        ),
    }
)


def parse_preset(text: str) -> Preset:
    """Read a preset that `dpkit fit` wrote, or somebody with measurements of their own.

    A TOML file whose keys are the fields of `StepCost` and, beside them, those of `Preset`. Without
    `kv_tokens`, the config says how large the cache is (``kv.num_blocks``).

    Raises:
        ValueError: it is no TOML, a key is unknown or missing, or a value is no number from 0 on.
    """
    table: dict[str, Any] = tomli.loads(text)
    cost_keys = {each.name for each in fields(StepCost)}
    own_keys = {each.name for each in fields(Preset)} - {"cost"}
    if strange := sorted(set(table) - cost_keys - own_keys):
        known = ", ".join(sorted(cost_keys | own_keys))
        raise ValueError(f"there is no key {strange[0]!r} in a preset; there are: {known}")
    for key, value in table.items():
        if key not in {"experts", "measured_by"} and not _is_amount(value):
            raise ValueError(f"{key} must be a number from 0 on, not {value!r}")
    for key in ("a_ms", "b_us", "c_us", "d_ns", "q_ns"):
        if key not in table:
            raise ValueError(f"a preset needs {key}; it may be 0")
    cost = {key: table[key] for key in cost_keys & set(table)}
    if "experts" in cost:
        cost["experts"] = _experts(cost["experts"])
    own = {"kv_tokens": _MODEST, "measured_by": "a file", **table}
    return Preset(cost=StepCost(**cost), **{key: own[key] for key in own_keys & set(own)})


_MODEST = 65_536  # what an engine holds whose model says nothing


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _experts(value: object) -> tuple[int, int]:
    match value:
        case [int(chosen), int(total)] if 0 < chosen <= total:
            return chosen, total
    raise ValueError(f"experts must be [K, E], such as [8, 128], not {value!r}")
