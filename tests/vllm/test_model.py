"""Which engines are served, which are refused by name, and what makes two engines' pages different."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ems.errors import ConfigError
from ems.vllm.model import describe, weights_identity


class HfConfig:
    """As much of a model's configuration as is looked at."""

    _commit_hash = None

    def __init__(self, **facts: object) -> None:
        self.facts = facts

    def to_json_string(self, *, use_diff: bool) -> str:
        assert use_diff is False
        return json.dumps({"rope_theta": 1e4, "transformers_version": "5", **self.facts})


def make_config(folder: Path, **changes: Any) -> Any:
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    model = {
        "model": str(folder),
        "dtype": torch.bfloat16,
        "quantization": None,
        "revision": None,
        "max_model_len": 2048,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in parallel.items()}),
        speculative_config=changes.get("speculative_config"),
        model_config=SimpleNamespace(
            **{key: changes.get(key, value) for key, value in model.items()},
            hf_config=HfConfig(**changes.get("hf", {})),
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto"), calculate_kv_scales=False),
        attention_config=SimpleNamespace(backend=changes.get("backend")),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def make_spec(**changes: Any) -> FullAttentionSpec:
    facts = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**facts, **changes})


def make_groups(*specs: Any, layers: int = 3) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layer.{group}.{layer}" for layer in range(layers)], spec)
        for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return tmp_path


def name_of(folder: Path, kv: KVCacheConfig | None = None, **changes: Any) -> str:
    return describe(make_config(folder, **changes), kv or make_groups(make_spec()), "default", "").namespace.name


def test_a_page_holds_a_block_of_all_layers(folder: Path) -> None:
    model = describe(make_config(folder), make_groups(make_spec()), "default", "")

    assert model.namespace.page_size == 3 * 2 * 16 * 2 * 8 * 2
    assert model.block_size == 16
    assert model.num_blocks == 10


def test_the_same_engine_twice_has_the_same_pages(folder: Path) -> None:
    assert name_of(folder) == name_of(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"hf": {"rope_theta": 5e5}},
        {"backend": "other"},
    ],
    ids=str,
)
def test_another_way_to_run_has_other_pages(folder: Path, changes: dict[str, Any]) -> None:
    assert name_of(folder, **changes) != name_of(folder)


@pytest.mark.parametrize(
    "kv",
    [
        lambda: make_groups(make_spec(block_size=32)),
        lambda: make_groups(make_spec(dtype=torch.float16)),
        lambda: make_groups(make_spec(num_kv_heads=4, head_size=4)),
        lambda: make_groups(make_spec(), layers=4),
    ],
    ids=["block size", "dtype", "heads", "layers"],
)
def test_another_layout_has_other_pages(folder: Path, kv: Callable[[], KVCacheConfig]) -> None:
    assert name_of(folder, kv()) != name_of(folder)


def test_tenants_and_named_models_have_pages_of_their_own(folder: Path) -> None:
    config, kv = make_config(folder), make_groups(make_spec())
    names = {
        describe(config, kv, tenant, model_id).namespace.name
        for tenant in ("default", "other")
        for model_id in ("", "mine")
    }

    assert len(names) == 4


def test_one_changed_byte_at_either_end_of_the_weights_is_another_model(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before = name_of(folder)
    content = bytearray(weights.read_bytes())
    for position in (0, len(content) - 1):
        content[position] ^= 1
        weights.write_bytes(content)
        assert name_of(folder) != before
        before = name_of(folder)


def test_a_change_between_the_samples_is_another_model(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(8 << 20))
    before = name_of(folder)
    content = bytearray(8 << 20)
    content[300_000] = 1
    weights.write_bytes(content)

    assert name_of(folder) != before


def test_a_single_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"one" * 1000)
    before = weights_identity(make_config(weights).model_config)
    weights.write_bytes(b"two" * 1000)

    assert weights_identity(make_config(weights).model_config) != before


def test_the_context_length_matters_where_positions_depend_on_it(folder: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "longrope"}}
    assert name_of(folder, hf=rope, max_model_len=4096) != name_of(folder, hf=rope, max_model_len=131072)
    assert name_of(folder, max_model_len=4096) == name_of(folder, max_model_len=131072)


def test_a_hub_model_is_known_by_name_and_revision(folder: Path) -> None:
    model = make_config(folder, model="org/name", revision="v2").model_config

    assert weights_identity(model) == "org/name@v2"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is 2"),
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size is 4"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size is 2"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative decoding"),
    ],
    ids=str,
)
def test_what_is_not_served_yet_is_refused_by_name(folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        describe(make_config(folder, **changes), make_groups(make_spec()), "default", "")

    assert named in str(error.value)


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        (make_groups, "0 KV cache groups"),
        (lambda: make_groups(make_spec(), sliding()), "2 KV cache groups"),
        (lambda: make_groups(sliding()), "SlidingWindowSpec"),
        (lambda: make_groups(make_spec(sliding_window=64)), "sliding-window"),
        (
            lambda: make_groups(MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)),
            "MLAAttentionSpec",
        ),
    ],
    ids=["no attention", "hybrid", "sliding window", "window in full attention", "MLA"],
)
def test_layers_that_are_not_served_yet_are_refused_by_name(
    folder: Path, kv: Callable[[], KVCacheConfig], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        describe(make_config(folder), kv(), "default", "")

    assert named in str(error.value)
