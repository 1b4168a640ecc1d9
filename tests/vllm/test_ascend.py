"""What vllm-ascend gives a connector: kinds of state, tensors of their own for each part, settings that matter.

Its shapes and classes, on CPU tensors; blocks have 128 tokens there.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec

from ems.errors import ConfigError
from ems.transfers.device import CpuDevice
from ems.transfers.plan import Slots
from ems.transfers.rows import PageBlocks
from ems.vllm.model import LocalPlane, describe, local_planes
from ems.vllm.pages import PlaneRows, plane_rows
from ems.vllm.planes import Plane, Portion, TokenOrder
from ems.vllm.token_order import token_order
from tests.vllm.test_model import SETTINGS, make_config, make_groups, make_spec

BLOCKS, TOKENS = 3, 128
NAMES = ("layers.0", "layers.1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    """As vllm-ascend derives it, beside vLLM's own class."""

    sparse_head_dim: tuple[int, ...] | None = None
    cache_sparse_li_c8: bool = False


def mla(**changes: Any) -> AscendMLAAttentionSpec:
    facts = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return AscendMLAAttentionSpec(**{**facts, **changes})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(current_platform, "get_device_name", lambda: "Ascend910B3", raising=False)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.23.0.post1" if name == "vllm-ascend" else version(name)
    )
    made: Any = make_config(tmp_path)
    made.device_config.device_type = "npu"
    made.additional_config = {}
    return made


def identity(config: Any, groups: KVCacheConfig, **additional: object) -> str:
    config.additional_config = additional
    return describe(config, groups, SETTINGS).identity


def test_a_latent_state_is_served_under_the_name_of_its_kind_there(config: Any) -> None:
    served = describe(config, make_groups(mla()), SETTINGS)

    assert [(plane.shards, plane.order) for plane in served.planes] == [(1, TokenOrder.BLOCK)]
    assert served.chunk_tokens == 256
    (local,) = local_planes(served, config, make_groups(mla()), 0, 0)
    assert local.heads == (1, 1, 1)


def test_tokens_that_are_compressed_are_refused(config: Any) -> None:
    compressed = mla()
    object.__setattr__(compressed, "tokens_per_state", 4)
    object.__setattr__(compressed, "compress_ratio", 4)

    with pytest.raises(ConfigError, match="AscendMLAAttentionSpec"):
        describe(config, make_groups(compressed), SETTINGS)


def test_an_order_that_only_a_decode_has_is_refused(config: Any) -> None:
    """``enable_kv_nz`` has the kernels of a decode keep the state in another format than a prefill's."""
    with pytest.raises(ConfigError, match=r"^enable_kv_nz is on, .* in --additional-config$"):
        identity(config, make_groups(mla()), enable_kv_nz=True)
    assert identity(config, make_groups(mla()), enable_kv_nz=False)


def test_settings_that_change_bytes_make_other_pages_and_the_others_do_not(config: Any) -> None:
    plain = identity(config, make_groups(mla()))

    assert identity(config, make_groups(mla()), enable_sparse_li_c8=True) != plain
    assert identity(config, make_groups(mla()), enable_sparse_sfa_c8=True) != plain
    assert identity(config, make_groups(mla()), enable_sparse_li_c8=False, enable_cpu_binding=False) == plain


def test_another_release_of_the_plugin_has_other_pages(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(config, make_groups(make_spec()))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.24.0")
    assert identity(config, make_groups(make_spec())) != before


def test_kernels_of_an_unknown_release_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    with pytest.raises(ConfigError, match=r"vllm-ascend, whose release is not known"):
        identity(config, make_groups(make_spec()))


def test_nobody_looked_at_the_order_of_its_tokens(config: Any) -> None:
    assert token_order(config, mla()) is TokenOrder.BLOCK
    assert token_order(config, make_spec(block_size=TOKENS)) is TokenOrder.BLOCK


def part(heads: int, values: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-9, 9, (BLOCKS, TOKENS, heads, values)).to(dtype)


def rows_of(caches: dict[str, Any], heads: int, portion: Portion, shards: int = 1) -> PlaneRows:
    plane = Plane("p", shards=shards, order=TokenOrder.BLOCK)
    (rows,) = plane_rows([LocalPlane(0, plane, NAMES, portion, (heads, heads))], caches, BLOCKS, 1)
    return rows


LATENT = {
    "latent and rope": [(512, torch.bfloat16), (64, torch.bfloat16)],
    "and an indexer": [(512, torch.bfloat16), (64, torch.bfloat16), (128, torch.bfloat16)],
    "of 8 bits with scales": [(512, torch.bfloat16), (64, torch.bfloat16), (128, torch.int8), (1, torch.float16)],
    "packed in 8 bits": [(656, torch.int8), (128, torch.bfloat16)],
}


@pytest.mark.parametrize("parts", LATENT.values(), ids=LATENT)
def test_each_part_of_a_latent_state_is_one_copy_a_block(parts: list[tuple[int, torch.dtype]]) -> None:
    """Layers that use the indices of another one have no indexer of their own."""
    caches = {
        NAMES[0]: tuple(part(1, values, dtype) for values, dtype in parts),
        NAMES[1]: tuple(part(1, values, dtype) for values, dtype in parts[:2]),
    }
    rows = rows_of(caches, 1, Portion())
    page = memoryview(bytearray(rows.namespace.page_size))
    plan = rows.rows.plan([PageBlocks([2])], Slots.of([page]), out=True)
    CpuDevice().copy(plan)

    everything = [tensor for name in NAMES for tensor in caches[name]]
    assert len(plan.sizes) == len(everything)
    assert bytes(page) == b"".join(tensor[2].view(torch.uint8).numpy().tobytes() for tensor in everything)


def test_heads_of_a_shard_are_one_copy_a_block() -> None:
    """With ``store_tp_size`` equal to the ranks; a copy of each head and token would be of 256 bytes."""
    pair = {name: (part(4, 128), part(4, 96)) for name in NAMES}
    whole = rows_of(pair, 4, Portion())
    page = memoryview(bytearray(whole.namespace.page_size))
    plan = whole.rows.plan([PageBlocks([1])], Slots.of([page]), out=True)
    CpuDevice().copy(plan)

    assert len(plan.sizes) == 4
    expected = [tensor[1] for name in NAMES for tensor in pair[name]]
    assert bytes(page) == b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in expected)


def test_ranks_with_other_heads_store_and_load_the_same_pages() -> None:
    """One rank has all heads, another one half of them."""
    pair = {name: (part(4, 128), part(4, 96)) for name in NAMES}
    alone = rows_of(pair, 4, Portion(0, 2), shards=2)
    pages = [memoryview(bytearray(alone.namespace.page_size)) for _ in range(2)]
    CpuDevice().copy(alone.rows.plan([PageBlocks([1], shard) for shard in range(2)], Slots.of(pages), out=True))

    half = {name: tuple(torch.zeros_like(tensor[:, :, :2]) for tensor in pair[name]) for name in NAMES}
    second = rows_of(half, 2, Portion(1, 1), shards=2)
    assert second.namespace.page_size == alone.namespace.page_size
    CpuDevice().copy(second.rows.plan([PageBlocks([0])], Slots.of(pages[1:]), out=False))
    for name in NAMES:
        for loaded, stored in zip(half[name], pair[name], strict=True):
            assert torch.equal(loaded[0], stored[1, :, 2:])
