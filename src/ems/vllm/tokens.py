"""What names the chunks of one of vLLM's requests: its tokens, and what else changes their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys


class WithoutAdapter:
    """A request as if it had no LoRA adapter, which vLLM would name by name and path."""

    lora_request = None

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def extra_keys(request: Any, block_size: int) -> Sequence[object]:
    """What else changes a block's KV (LoRA, multimodal content, cache salt, prompt embeddings), block by block."""
    if not (request.lora_request or request.mm_features or request.cache_salt) and (
        getattr(request, "prompt_embeds", None) is None
    ):
        return ()
    entries, position = [], 0
    for start in range(0, request.num_tokens, block_size):
        keys, position = generate_block_hash_extra_keys(request, start, start + block_size, position)
        entries.append(keys)
    return entries
