"""Names that appear in configs, logs and metrics: policies, engine kinds, finish reasons.

A leaf module: it imports nothing of dpkit, so that every layer may share one spelling.
"""

import enum


class PolicyName(enum.StrEnum):
    """Built-in balancing policies; any other policy is named ``"pkg.mod:Class"``."""

    KV_PRESSURE = "kv_pressure"
    INFLIGHT = "inflight"
    QUEUE_WEIGHTED = "queue_weighted"
    ROUND_ROBIN = "round_robin"


class EngineKind(enum.StrEnum):
    """Where an engine lives."""

    LOCAL = "local"  # a task in this process


class FinishReason(enum.StrEnum):
    """Why a request ended; every request has exactly one."""

    STOP = "stop"  # the model ended it: a stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # its client left
    ERROR = "error"  # refused or lost; the error says which
