"""Names that appear in configs, logs and metrics: policies, engine kinds and states, reasons.

A leaf module: it imports nothing of dpkit, so that every layer may share one spelling.
"""

import enum

VLLM_VERSION = "0.33.0"
"""The release of vLLM whose wire is spoken, and what an engine says that it is when it joins."""


class PolicyName(enum.StrEnum):
    """Built-in balancing policies; any other policy is named ``"pkg.mod:Class"``."""

    KV_PRESSURE = "kv_pressure"
    INFLIGHT = "inflight"
    QUEUE_WEIGHTED = "queue_weighted"
    LEAST_TOKENS = "least_tokens"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    EXPECTED_TTFT = "expected_ttft"


class Binding(enum.StrEnum):
    """When a request that may go to any engine gets one."""

    EARLY = "early"  # the moment it comes
    LATE = "late"  # when its engine would begin it with the next step


HOLDING_POLICIES = frozenset({PolicyName.EXPECTED_TTFT})
"""The built-in policies that can bind late; they do unless told otherwise."""


class EngineKind(enum.StrEnum):
    """Where an engine lives."""

    LOCAL = "local"  # a task in this process
    PROCESS = "process"  # a process of its own: what kills or hangs it stays there
    VLLM = "vllm"  # wherever somebody starts it: it joins, and speaks vLLM's wire


class Transport(enum.StrEnum):
    """How the messages of an engine in a process of its own travel."""

    IPC = "ipc"  # Unix sockets in a private folder
    TCP = "tcp"  # on 127.0.0.1


class StartMethod(enum.StrEnum):
    """How the process of an engine begins."""

    FORK = "fork"  # from a process that has loaded the model: ready at once, weights shared
    SPAWN = "spawn"  # afresh, with weights of its own: for what no fork survives, as CUDA


class Dtype(enum.StrEnum):
    """What a model of real weights computes in."""

    AUTO = "auto"  # bfloat16 where the CPU is fast at it, else float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quant(enum.StrEnum):
    """How the weights of a model are kept in memory."""

    NONE = "none"  # in the model's dtype
    INT4 = "int4"


class FinishReason(enum.StrEnum):
    """Why a request ended; every request has exactly one."""

    STOP = "stop"  # the model ended it: a stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # its client left
    ERROR = "error"  # refused or lost; the error says which


class Cause(enum.StrEnum):
    """What brought a request to its end; every request has exactly one."""

    STOP = "stop"  # the model or a stop string ended it
    LENGTH = "length"  # max_tokens reached
    CLIENT = "client"  # its reader left
    DEADLINE = "deadline"
    ENGINE_LOST = "engine_lost"
    DRAIN = "drain"  # the cluster takes nothing new, or its time to finish is over
    SHUTDOWN = "shutdown"
    REFUSED = "refused"  # it can never be served as it is
    OVERLOADED = "overloaded"  # the queue was full, or it waited there for too long


class EngineState(enum.StrEnum):
    """How an engine is, judged by its steps and not by its queue."""

    STARTING = "starting"  # loading, or waiting to be started again
    READY = "ready"
    STUCK = "stuck"  # its step takes longer than `step_timeout`
    DRAINING = "draining"  # finishes what it has and gets nothing new
    DOWN = "down"  # ended or given up


class Strategy(enum.StrEnum):
    """Who is started again when one engine of a group fails."""

    ONE_FOR_ONE = "one_for_one"  # that engine; the others do not notice
    ONE_FOR_ALL = "one_for_all"  # all of them, together: they cannot go on without each other
    ALL_BUT_ONE = "all_but_one"  # all others, together, and that one not until the next time
