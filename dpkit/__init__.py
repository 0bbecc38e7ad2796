"""dpkit: a Trio structured-concurrency engine kit for data-parallel LLM inference.

General layout, from the inside out (a test keeps it so):

- ``names messages sampling errors hashing costmodel abc``: leaf modules that all may import
- ``text checkpoint``: tokenizers and model files; ``config``: a TOML file into frozen objects
- ``engine balancer``: the decisions, sans-IO: no Trio, no sockets, no clocks
- ``nursery link``: the nursery tree that gives those decisions tasks, time and cancellation
- ``cli testing``: the command line, and the kit with which dpkit and you test engines and policies

This file only re-exports, and lazily: ``import dpkit`` costs nothing you do not use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkit.abc import LoadView as LoadView
    from dpkit.abc import Model as Model
    from dpkit.abc import Policy as Policy
    from dpkit.abc import Tokenizer as Tokenizer
    from dpkit.config.load import load_config as load_config
    from dpkit.config.load import parse_config as parse_config
    from dpkit.config.schema import Config as Config
    from dpkit.errors import ClusterClosed as ClusterClosed
    from dpkit.errors import ClusterFailed as ClusterFailed
    from dpkit.errors import ClusterNotStarted as ClusterNotStarted
    from dpkit.errors import ConfigError as ConfigError
    from dpkit.errors import DeadlineExceeded as DeadlineExceeded
    from dpkit.errors import DpkitError as DpkitError
    from dpkit.errors import Draining as Draining
    from dpkit.errors import EngineLost as EngineLost
    from dpkit.errors import InternalError as InternalError
    from dpkit.errors import ModelFailed as ModelFailed
    from dpkit.errors import ModelNotFound as ModelNotFound
    from dpkit.errors import ModelUnsupported as ModelUnsupported
    from dpkit.errors import OutOfMemory as OutOfMemory
    from dpkit.errors import Overloaded as Overloaded
    from dpkit.errors import PolicyFailed as PolicyFailed
    from dpkit.errors import RequestRejected as RequestRejected
    from dpkit.errors import ScalingFailed as ScalingFailed
    from dpkit.errors import ServiceFailed as ServiceFailed
    from dpkit.errors import TryLater as TryLater
    from dpkit.messages import Batch as Batch
    from dpkit.messages import BatchRow as BatchRow
    from dpkit.messages import Completion as Completion
    from dpkit.messages import EngineId as EngineId
    from dpkit.messages import EngineOutput as EngineOutput
    from dpkit.messages import GenerateRequest as GenerateRequest
    from dpkit.messages import ModelSpec as ModelSpec
    from dpkit.messages import Output as Output
    from dpkit.messages import StepResult as StepResult
    from dpkit.messages import TokenLogprob as TokenLogprob
    from dpkit.names import Cause as Cause
    from dpkit.names import EngineState as EngineState
    from dpkit.names import FinishReason as FinishReason
    from dpkit.names import Strategy as Strategy
    from dpkit.nursery.client import Client as Client
    from dpkit.nursery.cluster import Cluster as Cluster
    from dpkit.nursery.cluster import open_cluster as open_cluster
    from dpkit.nursery.events import Event as Event
    from dpkit.nursery.events import EventKind as EventKind
    from dpkit.nursery.services import open_services as open_services
    from dpkit.nursery.stream import OutputStream as OutputStream
    from dpkit.nursery.submission import Submission as Submission
    from dpkit.nursery.supervisor import Restarts as Restarts
    from dpkit.nursery.supervisor import supervise as supervise
    from dpkit.sampling import SamplingParams as SamplingParams

_HOMES = {
    "LoadView": "abc",
    "Model": "abc",
    "Policy": "abc",
    "Tokenizer": "abc",
    "load_config": "config.load",
    "parse_config": "config.load",
    "Config": "config.schema",
    "ClusterClosed": "errors",
    "ClusterFailed": "errors",
    "ClusterNotStarted": "errors",
    "ConfigError": "errors",
    "DeadlineExceeded": "errors",
    "DpkitError": "errors",
    "Draining": "errors",
    "EngineLost": "errors",
    "InternalError": "errors",
    "ModelFailed": "errors",
    "ModelNotFound": "errors",
    "ModelUnsupported": "errors",
    "OutOfMemory": "errors",
    "Overloaded": "errors",
    "PolicyFailed": "errors",
    "RequestRejected": "errors",
    "ScalingFailed": "errors",
    "ServiceFailed": "errors",
    "TryLater": "errors",
    "Batch": "messages",
    "BatchRow": "messages",
    "Completion": "messages",
    "EngineId": "messages",
    "EngineOutput": "messages",
    "GenerateRequest": "messages",
    "ModelSpec": "messages",
    "Output": "messages",
    "StepResult": "messages",
    "TokenLogprob": "messages",
    "Cause": "names",
    "EngineState": "names",
    "FinishReason": "names",
    "Strategy": "names",
    "Client": "nursery.client",
    "Cluster": "nursery.cluster",
    "open_cluster": "nursery.cluster",
    "Event": "nursery.events",
    "EventKind": "nursery.events",
    "open_services": "nursery.services",
    "OutputStream": "nursery.stream",
    "Submission": "nursery.submission",
    "Restarts": "nursery.supervisor",
    "supervise": "nursery.supervisor",
    "SamplingParams": "sampling",
}

__version__ = "0.1.0"
__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604 - all strings; a test checks each name


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dpkit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
