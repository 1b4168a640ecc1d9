"""What a vLLM engine's KV blocks are: their size, their meaning, and whether this version can serve them.

Everything that gives the bytes of a page their meaning goes into the namespace's fingerprint: another
weight file, dtype, block size, attention backend or vLLM release is another namespace, so a page can be
missed but never mistaken.  What cannot be served is refused by name before the first request.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from ems.errors import ConfigError
from ems.pool.client import Namespace
from ems.pool.keys import fingerprint, namespace_name

LAYOUT_VERSION = 1
"""Grows when the meaning of a stored page changes."""

_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class BlockModel(msgspec.Struct, frozen=True):
    """A served model's blocks: ``block_size`` tokens each, ``namespace`` with the bytes of one page.

    A page holds the state of ``layers`` in this order.
    """

    namespace: Namespace
    block_size: int
    num_blocks: int
    layers: tuple[str, ...]


def describe(vllm_config: Any, kv_cache_config: KVCacheConfig, tenant: str, model_id: str) -> BlockModel:
    """The blocks of the engine that ``vllm_config`` and ``kv_cache_config`` describe.

    Raises:
        ConfigError: the model or the way it is run cannot be served yet; the sentence names it.
    """
    _check_parallelism(vllm_config)
    spec = _attention(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    model = vllm_config.model_config
    identity = model_id or weights_identity(model)
    facts = {
        "layout_version": LAYOUT_VERSION,
        "weights": identity,
        "config": config_digest(model.hf_config),
        "rope_length": _rope_length(model),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(spec.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_size": spec.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_size": [spec.head_size, spec.head_size_v],
        "layers": list(group.layer_names),
        "page_bytes": spec.page_size_bytes,
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "attention_backend": str(vllm_config.attention_config.backend),
        "device": _device_identity(vllm_config),
        "vllm": vllm.__version__,
    }
    name = namespace_name(tenant, Path(str(model.model)).name, fingerprint(facts))
    page_size = spec.page_size_bytes * len(group.layer_names)
    return BlockModel(Namespace(name, page_size), spec.block_size, kv_cache_config.num_blocks, tuple(group.layer_names))


def _check_parallelism(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for key, flag in (
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, key, 1)
        if size != 1:
            raise ConfigError(f"{flag} is {size}, but EmsStoreConnector serves only 1 in this version; start with 1")
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "speculative decoding is configured, which EmsStoreConnector does not serve in this version; "
            "start without --speculative-config"
        )


def _attention(vllm_config: Any, kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups ({kinds}), but EmsStoreConnector serves models with one "
            "group of full attention layers in this version"
        )
    spec = groups[0].kv_cache_spec
    if isinstance(spec, MLAAttentionSpec) or type(spec) is not FullAttentionSpec:
        raise ConfigError(
            f"the model's layers keep KV as {type(spec).__name__}, but EmsStoreConnector serves only "
            "FullAttentionSpec (MHA, GQA) in this version"
        )
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise ConfigError(
            "the model uses sliding-window or chunked attention, which EmsStoreConnector does not serve in this version"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales is on, so equal KV bytes mean different values in two engines; "
            "start without --calculate-kv-scales"
        )
    return spec


def _device_identity(vllm_config: Any) -> str:
    """The kind of device, and on a CPU its vector instructions: the attention kernels pack blocks by them."""
    kind = str(vllm_config.device_config.device_type)
    if kind == "cpu":
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}/{current_platform.get_device_name()}"


def _rope_length(model: Any) -> int:
    """The context length where the position embedding depends on it (LongRoPE picks its factors by it), else 0."""
    return int(model.max_model_len) if "longrope" in model.hf_config.to_json_string(use_diff=False) else 0


def config_digest(hf_config: Any) -> str:
    """A digest of the model's configuration as the engine sees it, overrides included."""
    facts = json.loads(hf_config.to_json_string(use_diff=False))
    for unrelated in ("transformers_version", "_name_or_path", "architectures"):
        facts.pop(unrelated, None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def weights_identity(model_config: Any) -> str:
    """What tells one set of weights from another: a digest of the weight files, or name and revision on a hub.

    Local files count by name, size, time of change and :data:`_SAMPLES` spots of each, so that a model of any size
    costs a few megabytes of reading, and an edit is noticed wherever it is.
    """
    place = Path(str(model_config.model))
    if not place.exists():
        commit = getattr(model_config.hf_config, "_commit_hash", None)
        return f"{model_config.model}@{commit or model_config.revision or 'main'}"
    files = {path for pattern in _WEIGHTS for path in place.glob(pattern)} if place.is_dir() else {place}
    digest = hashlib.sha256()
    for path in sorted(files):
        facts = path.stat()
        digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
        with path.open("rb") as weights:
            for sample in range(_SAMPLES):
                weights.seek(max(facts.st_size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()
