"""The order of tokens in a block, as this machine's kernels were seen to keep it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ems.vllm import token_order as module
from ems.vllm.planes import TokenOrder
from ems.vllm.token_order import token_order

CPU = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
NPU = SimpleNamespace(device_config=SimpleNamespace(device_type="npu"))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    module._of_cpu.cache_clear()
    yield
    module._of_cpu.cache_clear()


def spec(dtype: torch.dtype = torch.float32, block_size: int = 32) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [32, 128])
def test_the_order_that_the_kernels_keep_is_named(dtype: torch.dtype, block_size: int) -> None:
    expected = {"amx": TokenOrder.CPU_AMX, "vec": TokenOrder.CPU_VECTOR}[_get_attn_isa(dtype, block_size, 64)]
    assert token_order(CPU, spec(dtype, block_size)) is expected


def test_kernels_that_keep_another_order_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = ops.cpu_attn_reshape_and_cache

    def other(key: Any, value: Any, *rest: Any, **named: Any) -> None:
        fill(value, key, *rest, **named)
        keys = rest[0]
        keys.copy_(keys.flip(2).clone())

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", other)
    assert token_order(CPU, spec()) is TokenOrder.BLOCK


def test_kernels_that_are_called_otherwise_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ops, "cpu_attn_reshape_and_cache")
    assert token_order(CPU, spec()) is TokenOrder.BLOCK


def test_an_accelerator_whose_kernels_nobody_looked_at_keeps_its_blocks() -> None:
    assert token_order(NPU, spec()) is TokenOrder.BLOCK
