"""A cluster loads real weights as its file says, once each, and shares the cores among engines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dpkit.config.schema import Config, EngineGroupConfig
from dpkit.names import Dtype, Quant
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.tiny import write_tiny_directory

if TYPE_CHECKING:
    from pathlib import Path


def group(path: Path, name: str, **keys: Any) -> EngineGroupConfig:
    return EngineGroupConfig(name=name, model=str(path), **keys)


async def test_each_group_gets_the_model_that_it_asks_for(tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "tiny")
    groups = [
        group(path, "exact", dtype=Dtype.FLOAT32, count=2),
        group(path, "again", dtype=Dtype.FLOAT32),
        group(path, "half", dtype=Dtype.BFLOAT16),
        group(path, "small", quant=Quant.INT4),
    ]
    async with open_cluster(Config(engines=groups)) as cluster:
        exact, second, again, half, small = (loop.core.model for loop in cluster._loops)
        assert exact is second is again
        assert len({id(model) for model in (exact, half, small)}) == 3
        assert half.spec.kv_bytes_per_token * 2 == exact.spec.kv_bytes_per_token
        assert small.spec.kv_bytes_per_token == half.spec.kv_bytes_per_token
        assert len((await cluster.client.complete("hello", max_tokens=3)).token_ids) <= 3


async def test_engines_share_the_cores(tmp_path: Path, monkeypatch) -> None:
    path = write_tiny_directory(tmp_path / "tiny")
    for cores, engines, threads in [(8, 3, 2), (8, 1, 8), (2, 3, 1)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, n=cores: set(range(n)))
        config = Config(engines=[group(path, "tiny", count=engines, dtype=Dtype.FLOAT32)])
        async with open_cluster(config) as cluster:
            assert {loop.core.model.threads_per_engine for loop in cluster._loops} == {threads}
