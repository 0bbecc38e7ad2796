"""A cluster loads real weights as its file says, once each, and shares the cores among engines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dpkit.config.groups import KvConfig, SupervisionConfig
from dpkit.config.load import load_config
from dpkit.config.schema import Config, EngineGroupConfig
from dpkit.engine.models.torch.linear import Int4
from dpkit.engine.models.torch.model import TorchModel
from dpkit.engine.models.torch.transformer import Transformer
from dpkit.errors import ClusterNotStarted, ModelUnsupported, OutOfMemory
from dpkit.names import Dtype, Quant
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.tiny import write_tiny_directory
from tests.nursery.lab import loop_of

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
        exact, second, again, half, small = (loop_of(slot).core.model for slot in cluster._slots)
        assert exact is second is again
        assert len({id(model) for model in (exact, half, small)}) == 3
        assert half.spec.kv_bytes_per_token * 2 == exact.spec.kv_bytes_per_token
        assert small.spec.kv_bytes_per_token == half.spec.kv_bytes_per_token
        assert len((await cluster.client.complete("hello", max_tokens=3)).token_ids) <= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_device_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "tiny")
    file = tmp_path / "dpkit.toml"
    file.write_text(f'[[engines]]\nmodel = "{path}"\ndevice = "cuda"\n')
    with pytest.raises(ModelUnsupported, match="device 'cuda' cannot be used here: "):
        async with open_cluster(load_config(file)):
            pass


@pytest.mark.parametrize(
    ("keys", "dtype", "is_int4"),
    [
        ('dtype = "float32"', torch.float32, False),
        ('dtype = "bfloat16"', torch.bfloat16, False),
        ('quant = "int4"', torch.bfloat16, True),
    ],
)
async def test_what_a_file_says_of_numbers_reaches_the_weights_and_the_cache(
    tmp_path: Path, keys: str, dtype: torch.dtype, is_int4: bool
) -> None:
    path = write_tiny_directory(tmp_path / "tiny", intermediate_size=128)
    file = tmp_path / "dpkit.toml"
    file.write_text(f'[[engines]]\nmodel = "{path}"\n{keys}\n[engines.kv]\nnum_blocks = 8\n')
    async with open_cluster(load_config(file)) as cluster:
        model = loop_of(cluster._slots[0]).core.model
        assert isinstance(model, TorchModel)
        transformer = model._transformer
        assert isinstance(transformer, Transformer)
        assert transformer.dtype is dtype
        assert isinstance(transformer._layers[0].down, Int4) is is_int4
        assert model.allocate(num_blocks=1, block_size=1).dtype is dtype
        assert (await cluster.client.complete("hello", max_tokens=2)).token_ids


async def test_engines_share_the_cores(tmp_path: Path, monkeypatch) -> None:
    path = write_tiny_directory(tmp_path / "tiny")
    for cores, engines, threads in [(8, 3, 2), (8, 1, 8), (2, 3, 1)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, n=cores: set(range(n)))
        config = Config(engines=[group(path, "tiny", count=engines, dtype=Dtype.FLOAT32)])
        async with open_cluster(config) as cluster:
            assert {loop_of(slot).core.model.threads_per_engine for slot in cluster._slots} == {
                threads
            }


@pytest.mark.parametrize("blocks", [10**9, 2**31 - 1])
async def test_a_kv_cache_that_does_not_fit_names_the_key_to_lower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, blocks: int
) -> None:
    path = write_tiny_directory(tmp_path / "tiny")
    config = Config(
        engines=[
            group(
                path,
                "smol",
                kv=KvConfig(num_blocks=blocks, block_size=1024),
                supervision=SupervisionConfig(intensity=0),
            )
        ]
    )
    with pytest.raises(
        ClusterNotStarted, match=r"KV cache of .* lower engines.smol.kv.memory"
    ) as e:
        async with open_cluster(config):
            pass
    assert isinstance(e.value.__cause__, OutOfMemory)
    caplog.clear()  # its traceback holds the model, and so the mapped file
