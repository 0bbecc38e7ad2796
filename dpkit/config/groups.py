"""The tables of one group of engines: what serves, its budget, its memory, and who restarts it.

A part of the schema (`dpkit.config.schema`), by the same rules.
"""

# No `from __future__ import annotations`: cattrs reads these annotations at run time.
from attrs import field, frozen
from attrs.validators import optional

from dpkit.config.checks import Between, MadeOf, Spelt, model_name, rendezvous, tcp_address
from dpkit.config.reasons import why
from dpkit.config.units import Bytes, Seconds, show_duration, show_size
from dpkit.names import (
    VLLM_VERSION,
    Dtype,
    EngineKind,
    Quant,
    StartMethod,
    Strategy,
    Transport,
)

UNNAMED = "engine"
"""What a group is called that has no name."""


@frozen(kw_only=True)
class SchedulerConfig:
    """The budget of one step. Left out, it is the model's own.

    A small CPU model and an H200 differ by a factor of ten here, so the model knows best.
    """

    max_num_seqs: int | None = field(
        default=None,
        validator=optional(Between(1, 65_536)),
        metadata=why(
            "The model's own. Requests that run at once: more share each read of the weights, "
            "fewer answer faster."
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        validator=optional(Between(1, 1_048_576)),
        metadata=why(
            "The model's own. Tokens in one step: more prefill faster, fewer let running requests "
            "wait less."
        ),
    )
    long_prefill_share: float = field(
        default=1.0,
        validator=Between(0.01, 1.0),
        metadata=why(
            "All: long prompts are done soonest. With less, prompts that fit into the rest of a "
            "step pass them."
        ),
    )


@frozen(kw_only=True)
class KvConfig:
    """The paged KV cache of one engine.

    With neither `num_blocks` nor `memory` the pool has the size that the model suggests.
    """

    block_size: int = field(
        default=16,
        validator=Between(1, 1024),
        metadata=why("vLLM's: the waste is half a block a sequence, and block tables stay short."),
    )
    num_blocks: int | None = field(
        default=None,
        validator=optional(Between(1, 2**31 - 1)),  # block ids are 32-bit in attention kernels
        metadata=why("The model's own."),
    )
    memory: Bytes | None = field(
        default=None,
        validator=optional(Between(1, 2**50, show=show_size)),  # more is a slip of the unit
        metadata=why("The model's own."),
    )
    prefix_cache: bool = field(
        default=True, metadata=why("A hit saves its prefill; a miss costs one hash a block.")
    )


@frozen(kw_only=True)
class SupervisionConfig:
    """What happens when an engine fails. The words and the arithmetic are Erlang's.

    More than `intensity` restarts within `period`, and the engine is given up.
    """

    strategy: Strategy = field(
        default=Strategy.ONE_FOR_ONE,
        metadata=why(
            "Engines do not depend on one another. Ranks of a mixture-of-experts model do: "
            "one_for_all. all_but_one: these go on without the one that was lost."
        ),
    )
    intensity: int = field(
        default=3,
        validator=Between(0, 1000),
        metadata=why(
            "Survives a burst. What fails a fourth time is broken; 0 gives up at the first failure."
        ),
    )
    period: Seconds = field(
        default=60.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why("Longer than a load and a warm-up; much longer, and old failures add up."),
    )
    backoff: Seconds = field(
        default=0.1,
        validator=Between(0, 3600.0, show=show_duration),
        metadata=why(
            "The wait before the first restart: a stray failure costs next to nothing. Each "
            "further one within period waits twice as long."
        ),
    )
    backoff_max: Seconds = field(
        default=10.0,
        validator=Between(0, 3600.0, show=show_duration),
        metadata=why("What has failed for long is tried now and then."),
    )
    jitter: float = field(
        default=0.1,
        validator=Between(0.0, 1.0),
        metadata=why(
            "Share by which a wait is longer or shorter, at random: what fails together should "
            "not come back together."
        ),
    )
    step_timeout: Seconds = field(
        default=120.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "No step of a sound engine takes this long, not even the first one, which compiles. "
            "A longer one counts as hung, and the engine as lost."
        ),
    )


@frozen(kw_only=True)
class ProcessConfig:
    """The process of an engine of ``kind = "process"``; nothing to those of other kinds."""

    start: StartMethod = field(
        default=StartMethod.FORK,
        metadata=why(
            "From one process that has loaded the model: the second engine is ready as soon as the "
            'first, and shares its weights. "spawn" for what no fork survives, such as CUDA.'
        ),
    )
    transport: Transport = field(
        default=Transport.IPC,
        metadata=why(
            "Unix sockets in a folder that is yours alone: no port to clash, none to guard."
        ),
    )
    start_timeout: Seconds = field(
        default=300.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "Weights on a slow disk take minutes. What takes longer than this has failed."
        ),
    )
    max_message: Bytes = field(
        default=64 * 2**20,
        validator=Between(2**10, 2**31, show=show_size),
        metadata=why(
            "A prompt of a million tokens is 5 MB. An engine that sends more than this is broken, "
            "and ends."
        ),
    )


@frozen(kw_only=True)
class VllmConfig:
    """Where engines of ``kind = "vllm"`` join, and when one of them counts as lost.

    They are vLLM's own, or dpkit's behind the same wire, and somebody else starts them.
    """

    handshake: str | None = field(
        default=None,
        validator=optional(tcp_address),
        metadata=why("No other kind has one. Where engines say HELLO, on this machine."),
    )
    host: str | None = field(
        default=None,
        validator=optional(MadeOf(r"[\w.:\[\]-]+", "a host name or an IP address")),
        metadata=why(
            "That of handshake. How engines reach this machine, if it listens at an address that "
            "they cannot use as it stands."
        ),
    )
    rendezvous: str | None = field(
        default=None,
        validator=optional(rendezvous),
        metadata=why(
            "Only for engines that step together: where rank 0 listens for the others, an address "
            "of its host, at this port and the four after it. All are told."
        ),
    )
    join_timeout: Seconds = field(
        default=600.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "Large weights take minutes to load. How long a start waits for an engine, and the "
            "engine may take from HELLO to READY. Who comes later is welcome all the same."
        ),
    )
    dead_after: Seconds = field(
        default=60.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "The wire has no heartbeat, and vLLM answers between two steps only: this is longer "
            "than any step. An engine that says nothing for so long, though it was asked, is lost."
        ),
    )
    abort_timeout: Seconds = field(
        default=10.0,
        validator=Between(0.001, 3600.0, show=show_duration),
        metadata=why(
            "An engine says with its next step that it has dropped a request. One that does not "
            "has forgotten it, and nobody waits any more."
        ),
    )
    version: str = field(
        default=VLLM_VERSION,
        validator=MadeOf(r"[\w.]+", "letters, digits and '.'"),
        metadata=why(
            "The release whose messages dpkit is tried with; an engine of another is refused. Name "
            "another once you have tried it."
        ),
    )
    max_message: Bytes = field(
        default=64 * 2**20,
        validator=Between(2**10, 2**31, show=show_size),
        metadata=why("As for processes."),
    )


@frozen(kw_only=True)
class EngineGroupConfig:
    """A group of `count` equal engines, called NAME-0, NAME-1 and so on."""

    name: str = field(
        default=UNNAMED,
        validator=MadeOf("[a-z0-9_-]+", "'a' to 'z', digits, '_' and '-'"),
        metadata=why("One group needs no name."),
    )
    count: int = field(
        default=1,
        validator=Between(1, 1024),
        metadata=why("One always fits; more is a decision on memory."),
    )
    kind: EngineKind = field(
        default=EngineKind.LOCAL,
        metadata=why(
            'A task in this process: nothing to set up. "process": what kills or hangs an engine '
            'stays in it, and engines compute side by side. "vllm": they are started elsewhere, '
            "and join."
        ),
    )
    model: str = field(
        validator=model_name, metadata=why("There is no model that everybody means.")
    )
    dtype: Dtype = field(
        default=Dtype.AUTO,
        metadata=why(
            "bfloat16 where the CPU is fast at it, else float32, which alone gives the same text "
            "whatever the batch: under bfloat16 a repeated prompt, found in the cache, may go on "
            "otherwise even at temperature 0. For models with weights only."
        ),
    )
    quant: Quant = field(
        default=Quant.NONE,
        metadata=why(
            "Weights as they are. Decoding waits for weights to be read: four bits are faster and "
            "a little less exact. For models with weights only."
        ),
    )
    device: str = field(
        default="cpu",
        validator=Spelt("cpu|cuda(:[0-9]+)?", '"cpu", "cuda" or "cuda:N"'),
        metadata=why(
            "There is always one. Engines that are tasks share one copy of the weights on it. For "
            "models with weights only."
        ),
    )
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    kv: KvConfig = field(factory=KvConfig)
    supervision: SupervisionConfig = field(factory=SupervisionConfig)
    process: ProcessConfig = field(factory=ProcessConfig)
    vllm: VllmConfig = field(factory=VllmConfig)
