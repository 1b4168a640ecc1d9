"""How an engine's kernels order the tokens of a block, and the block cut so that its parts have them in order.

What always holds: an order is named only where the kernels of this very release were seen to keep it (CPU), or where
vLLM's sources say so (CUDA without quantised state, MLA); else pages are for engines of the same block size alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from ems.vllm import compat
from ems.vllm.planes import TokenOrder

AMX_DIMENSIONS = 16
"""Dimensions of a value that lie in one tile of AMX."""
_CPU_KERNELS = {"amx": TokenOrder.CPU_AMX, "vec": TokenOrder.CPU_VECTOR, "vec16": TokenOrder.CPU_VECTOR}


def token_order(vllm_config: Any, spec: Any) -> TokenOrder:
    """The order that the kernels keep in blocks of ``spec``."""
    if compat.tokens_per_state(spec) != "1" or compat.kv_quant_mode(spec) not in ("none", "0"):
        return TokenOrder.BLOCK
    kind = str(vllm_config.device_config.device_type)
    if isinstance(spec, MLAAttentionSpec) and kind != "npu":
        return TokenOrder.TOKENS
    if kind == "cpu":
        return _of_cpu(spec.dtype, spec.block_size, spec.head_size)
    return TokenOrder.TOKENS if kind == "cuda" and not current_platform.is_rocm() else TokenOrder.BLOCK


def in_order(tensor: torch.Tensor, order: TokenOrder) -> list[torch.Tensor]:
    """A layer ``[num_blocks, heads, tokens, values]`` as parts ``[num_blocks, heads, values]``, their tokens in order.

    It is one part where its tokens are in order, or where no order is known.
    """
    if order not in (TokenOrder.CPU_VECTOR, TokenOrder.CPU_AMX):
        return [tensor]
    blocks, heads, _, values = tensor.shape
    keys, of_values = tensor.view(blocks, heads, 2, -1).unbind(2)
    if order is TokenOrder.CPU_VECTOR:
        return [of_values, *keys.unflatten(2, (values // 2, -1)).unbind(2)]
    return [keys, *of_values.unflatten(2, (values // 2 // AMX_DIMENSIONS, -1)).unbind(2)]


@functools.cache
def _of_cpu(dtype: torch.dtype, block_size: int, head_size: int) -> TokenOrder:
    """The order of vLLM's kernels for CPUs, if they fill blocks of two sizes as it says."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kernels = _get_attn_isa(dtype, block_size, head_size)
        order, tokens = _CPU_KERNELS.get(kernels, TokenOrder.BLOCK), 4 * block_size
        layers = [_filled(tokens, dtype, size, head_size, kernels) for size in (block_size, 2 * block_size)]
        small, large = ([part.transpose(0, 1).flatten() for part in in_order(layer, order)] for layer in layers)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return TokenOrder.BLOCK  # another release, whose kernels are called otherwise
    same = order is not TokenOrder.BLOCK and all(map(torch.equal, small, large))
    return order if same else TokenOrder.BLOCK


def _filled(tokens: int, dtype: torch.dtype, block_size: int, head_size: int, kernels: str) -> torch.Tensor:
    """A layer of one head as the kernels fill it with the same ``tokens``, whatever the block size."""
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(tokens, 1, head_size, generator=generator).to(dtype) for _ in range(2))
    cache = torch.zeros(tokens // block_size, 1, block_size, 2 * head_size, dtype=dtype)
    of_keys, of_values = cache.view(cache.shape[0], 1, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, of_keys, of_values, torch.arange(tokens), kernels)
    return cache
