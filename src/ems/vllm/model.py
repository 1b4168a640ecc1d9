"""What a vLLM engine's KV blocks are: their size, their meaning, and whether this version can serve them.

Everything that gives the bytes of a page their meaning goes into the namespace's fingerprint: another
weight file, dtype, block size, attention backend or vLLM release is another namespace, so a page can be
missed but never mistaken.  What cannot be served is refused by name before the first request.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ems.errors import ConfigError
from ems.pool.keys import fingerprint, namespace_name
from ems.pool.names import MODEL, PLANE, TENANT, plain_facts
from ems.pool.prompts import CHAIN, SERVES
from ems.vllm import compat
from ems.vllm.configuration.settings import ConnectorSettings, check_kvcache_type
from ems.vllm.planes import Plane, Portion, TokenOrder, portion, shard_count
from ems.vllm.token_order import token_order
from ems.vllm.weights import config_digest, plain_text, weights_identity

LAYOUT_VERSION = 3
"""Grows when the meaning of a stored page changes."""
CHUNK_TOKENS = 256
"""Tokens whose state one page holds, unless the settings say otherwise."""

_DRAFTS_WITHOUT_STATE = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Ways to draft that keep no KV of their own and leave the model's as it is."""

_MULTIMODAL = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "language_model_only",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_device_do_normalize",
)  # fmt: skip

_ASCEND_PRECISION = ("enable_sparse_sfa_c8", "enable_sparse_li_c8", "c8_enable_reshape_optim")
"""Settings of vllm-ascend that change the bytes of a block."""


class BlockModel(msgspec.Struct, frozen=True):
    """A served model's blocks of ``block_size`` tokens, of which the engine has ``num_blocks``.

    ``identity`` names model, layout and tenant; every page lies in one of ``planes``, and has the state of a chunk of
    ``page_blocks`` blocks.
    """

    identity: str
    block_size: int
    num_blocks: int
    groups: int
    planes: tuple[Plane, ...]
    facts: dict[str, str] = {}
    """What the fingerprint stands for, in words."""
    page_blocks: int = 1

    @property
    def chunk_tokens(self) -> int:
        return self.block_size * self.page_blocks

    @property
    def fails_whole(self) -> bool:
        """Whether a load that fails in part fails as a whole.

        Block numbers do not tell several groups apart.  Behind a window the engine has dropped what it would need to
        compute the first missing block.
        """
        return self.groups > 1 or any(plane.window for plane in self.planes)

    def descriptions(self, chain_name: str) -> dict[str, dict[str, str]]:
        """What each plane's namespace means; chains of keys begin with ``chain_name``."""
        chain = chain_name[len(self.identity) + 1 :]
        return {
            plane.namespace: {
                **self.facts,
                PLANE: f"{plane.group}.{plane.stage}",
                **plain_facts({CHAIN: chain} if chain else {}),
                "chunk_tokens": str(self.chunk_tokens // plane.parts),
                "page_shards": str(plane.shards),
                "window": str(plane.window),
            }
            for plane in self.planes
            if self.facts
        }

    @property
    def namespaces(self) -> list[str]:
        return [plane.namespace for plane in self.planes]


class LocalPlane(msgspec.Struct, frozen=True):
    """What one rank has of a plane: ``layers`` in the order of a page, and its ``portion`` of each block's shards.

    ``heads`` are the KV heads that each layer's tensor has here.
    """

    number: int
    plane: Plane
    layers: tuple[str, ...]
    portion: Portion
    heads: tuple[int, ...]

    @property
    def leading(self) -> bool:
        """Whether these pages are the ones by which blocks are counted."""
        return not self.number and not self.portion.first


def describe(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    settings: ConnectorSettings,
    offloaded: Sequence[int] | None = None,
) -> BlockModel:
    """The blocks of the engine that ``vllm_config`` and ``kv_cache_config`` describe; the same on every rank.

    ``offloaded`` are the KV cache groups that vLLM's OffloadingConnector moves, whatever they keep.

    Raises ConfigError: the model or the way it is run cannot be served; the sentence names it.
    """
    check_run(vllm_config)
    any_kind = offloaded is not None
    numbers = range(len(kv_cache_config.kv_cache_groups)) if offloaded is None else offloaded
    groups = [kv_cache_config.kv_cache_groups[number] for number in numbers]
    specs = [_served(group.kv_cache_spec, any_kind=any_kind) for group in groups]
    if not specs:
        raise ConfigError("the model has no KV cache, so there is nothing that EmsStoreConnector could store")
    if getattr(kv_cache_config, "has_mixed_precision_kv_cache", False) and not any_kind:
        # The engine clears blocks that it gives to others before it says so, and a save may still read them.
        raise ConfigError(
            "the layers' KV caches differ in precision, but EmsStoreConnector serves only one; start without "
            "--kv-cache-dtype-skip-layers"
        )
    block_sizes = {spec.block_size for spec in specs}
    if len(block_sizes) != 1 and not any_kind:
        raise ConfigError(
            f"the model's KV cache groups have block sizes {sorted(block_sizes)}, but EmsStoreConnector serves only "
            "one block size for all groups"
        )
    block_size = math.lcm(*block_sizes)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and len(groups) > 1:
        raise ConfigError(
            f"--pipeline-parallel-size is {stages} and the model has {len(groups)} KV cache groups, but "
            "EmsStoreConnector serves several groups only with 1"
        )
    check_kvcache_type(settings.kvcache_type, mla=any(isinstance(spec, MLAAttentionSpec) for spec in specs))
    shards = [_shards(vllm_config, spec, settings.store_tp_size) for spec in specs]
    model = vllm_config.model_config
    orders = [token_order(vllm_config, spec) for spec in specs]
    single = len(block_sizes) > 1 or any(map(_window, specs))
    page_blocks = _page_blocks(block_size, settings.chunk_tokens, single=single)
    facts = {
        "layout_version": LAYOUT_VERSION,
        **engine_facts(vllm_config, settings),
        "chunk_tokens": block_size * page_blocks,
        "token_order": [
            f"{order.value} of {block_size}" if order is TokenOrder.BLOCK else order.value for order in orders
        ],
        "groups": [_group_facts(vllm_config, spec) for spec in specs],
        "shards": shards,
        "layers": [list(group.layer_names) for group in groups] if stages == 1 else [],
        "stages": [get_pp_indices(int(model.hf_text_config.num_hidden_layers), rank, stages) for rank in range(stages)],
    }
    name = Path(str(model.model)).name
    identity = namespace_name(settings.tenant, name, fingerprint(facts))
    # With adapters, only who asks for the model by its name means pages without one.
    serves = {} if getattr(vllm_config, "lora_config", None) is None else {SERVES: model.served_model_name}
    in_words = plain_facts({"kind": "vllm", TENANT: settings.tenant, MODEL: name, **serves, **facts})
    planes: list[Plane] = []
    for group, spec, pages, order in zip(numbers, specs, shards, orders, strict=True):
        window, state, parts = _window(spec), _keeps_state(spec), block_size // spec.block_size
        planes += [
            Plane(f"{identity}/{group}.{stage}", group, stage, pages, window, order, state, parts)
            for stage in range(stages)
        ]
    # Searches begin with the planes that need every block.
    planes.sort(key=lambda plane: plane.window > 0)
    num_blocks = kv_cache_config.num_blocks
    count = len(kv_cache_config.kv_cache_groups)
    return BlockModel(identity, block_size, num_blocks, count, tuple(planes), in_words, page_blocks)


def engine_facts(vllm_config: Any, settings: ConnectorSettings) -> dict[str, object]:
    """What gives KV bytes their meaning, whatever pages they lie in.

    Raises ConfigError: the weights cannot be told from others.
    """
    model = vllm_config.model_config
    return {
        "namespace": settings.namespace,
        "weights": settings.model_id or weights_identity(model, vllm_config.load_config, vllm_config.parallel_config),
        "draft": _draft_identity(vllm_config, named=bool(settings.model_id)),
        "config": config_digest(model, named=bool(settings.model_id)),
        "rope_length": _rope_length(model),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "multimodal": _multimodal(model),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "cache_dtype_not_in": sorted(getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or ()),
        "attention_backend": str(vllm_config.attention_config.backend),
        **{name: value for name, value in _ascend_settings(vllm_config).items() if name in _ASCEND_PRECISION and value},
        "device": _device_identity(vllm_config),
        "vllm": vllm.__version__,
    }


def _ascend_settings(vllm_config: Any) -> dict[str, Any]:
    """What ``--additional-config`` says, which means something to vllm-ascend alone."""
    given = getattr(vllm_config, "additional_config", None)
    return given if isinstance(given, dict) and vllm_config.device_config.device_type == "npu" else {}


def local_planes(
    model: BlockModel, vllm_config: Any, kv_cache_config: KVCacheConfig, rank: int, stage: int
) -> list[LocalPlane]:
    """What tensor-parallel rank ``rank`` of pipeline stage ``stage`` has of each plane of ``model``.

    Raises ConfigError: the tensor-parallel size does not fit the model's KV heads.
    """
    found = []
    for number, plane in enumerate(model.planes):
        if plane.stage == stage:
            group = kv_cache_config.kv_cache_groups[plane.group]
            spec = _served(group.kv_cache_spec, any_kind=True)
            ranks = vllm_config.parallel_config.tensor_parallel_size
            mine = portion(_heads(vllm_config, spec), plane.shards, ranks, rank)
            layers = tuple(group.layer_names)
            found.append(LocalPlane(number, plane, layers, mine, _heads_of_layers(group.kv_cache_spec, layers)))
    return found


def check_hosts(hosts: int) -> None:
    """Refuse an engine whose tensor- and pipeline-parallel ranks run on several hosts, which have a pool each.

    Raises ConfigError: so it is.
    """
    if hosts > 1:
        raise ConfigError(
            f"the engine's tensor- and pipeline-parallel ranks run on {hosts} hosts, which have a pool each, but "
            "EmsStoreConnector serves ranks of one host; give each an engine or data-parallel ranks of its own, or "
            "start without --kv-transfer-config"
        )


def check_alone(registered: object) -> None:
    """Refuse a second engine in one process: vLLM keeps one connector there, which cannot tell their tensors apart.

    Raises ConfigError: an engine has ``registered`` already.
    """
    if registered:
        raise ConfigError(
            "this process has an engine with EMS already, and vLLM has one KV connector a process; end that one first "
            "(llm.llm_engine.engine_core.shutdown()), or start this one without VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )


def check_run(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    check_hosts(int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))))
    for key, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, key, 1)
        if size != 1:
            raise ConfigError(f"{flag} is {size}, but EmsStoreConnector serves only 1; start with 1")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales is on, so equal KV bytes mean different values in two engines; "
            "start without --calculate-kv-scales"
        )
    if _ascend_settings(vllm_config).get("enable_kv_nz"):
        raise ConfigError(
            "enable_kv_nz is on, so the kernels of a decode keep KV in another order than those of a prefill, but "
            "EmsStoreConnector serves only one; start without it in --additional-config"
        )
    model = vllm_config.model_config
    if compat.counts_references(model):
        raise ConfigError(
            "cascade attention is on, which in this release of vLLM takes blocks that EmsStoreConnector holds for ones "
            "that all requests share; start without --no-disable-cascade-attn"
        )
    if getattr(model, "pooler_config", None) is not None and not getattr(model, "is_prefix_caching_supported", True):
        raise ConfigError(
            "the model's result is made from the states of all tokens, but EmsStoreConnector spares the engine those "
            "of a prefix; start without --kv-transfer-config"
        )


def _served(spec: Any, *, any_kind: bool) -> Any:
    """The spec of a group's layers, or of the first of them.

    Raises ConfigError: it is a kind of state that pages cannot hold; with ``any_kind`` they hold whole blocks of it.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        first, *_ = (_served(other, any_kind=any_kind) for other in spec.kv_cache_specs.values())
        return first
    if any_kind:
        return spec
    if _is_cut(spec):
        if getattr(spec, "non_causal", False):
            raise ConfigError(
                "the model has layers in which a token sees later ones, so that its state is not that of a prefix; "
                "EmsStoreConnector does not serve it"
            )
        if getattr(spec, "attention_chunk_size", None) is None:
            return spec
        raise ConfigError(
            f"the model attends in chunks of {spec.attention_chunk_size} tokens, which EmsStoreConnector does not serve"
        )
    if compat.HANDS_OVER_STATES and _keeps_state(spec) and spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"the model's state-space layers keep states in the mode '{spec.mamba_cache_mode}', but EmsStoreConnector "
            "serves 'align'; start with --enable-prefix-caching --mamba-cache-mode align"
        )
    if compat.HANDS_OVER_STATES and _keeps_state(spec):
        return spec
    raise ConfigError(
        f"the model has layers that keep their state as {type(spec).__name__}, but EmsStoreConnector serves full "
        "attention (MHA, GQA), MLA, sliding windows and, from vLLM 0.32 on, state-space layers"
    )


def _is_cut(spec: Any) -> bool:
    """Whether pages hold the state of KV heads and tokens of ``spec``, and not whole blocks of a rank.

    So they do of MLA as vllm-ascend has it, in tensors of its own for each part.  Where it compresses tokens a block
    stands for more of them than its size.
    """
    of_ascend = type(spec).__name__ == "AscendMLAAttentionSpec" and compat.tokens_per_state(spec) == "1"
    return of_ascend or type(spec) in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def _keeps_state(spec: Any) -> bool:
    return isinstance(spec, MambaSpec)


def _page_blocks(block_size: int, wanted: int, *, single: bool) -> int:
    """How many blocks of ``block_size`` tokens one page holds, where ``wanted`` tokens a page are asked for.

    With a window a page is a ``single`` block: the engine may have dropped the first ones of a longer run before it
    ends.

    Raises ConfigError: ``wanted`` is no multiple of the block size.
    """
    if wanted % block_size:
        raise ConfigError(f"chunk_tokens is {wanted}, expected a multiple of --block-size, which is {block_size}")
    return 1 if single else wanted // block_size or max(CHUNK_TOKENS // block_size, 1)


def _heads_of_layers(spec: Any, layers: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return tuple(compat.num_heads(spec.kv_cache_specs[name]) for name in layers)
    return (compat.num_heads(spec),) * len(layers)


def _window(spec: Any) -> int:
    """How many tokens a layer with a sliding window sees; 0 for layers that keep all blocks."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + compat.extra_retained_tokens(spec)
    if isinstance(spec, FullAttentionSpec):
        return 0
    return 1 if _keeps_state(spec) else int(getattr(spec, "attention_chunk_size", 0) or 0)


def _heads(vllm_config: Any, spec: Any) -> int:
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if not _is_cut(spec):
        return 1 if getattr(spec, "tp_replicated", False) else ranks
    if ranks == 1:
        return compat.num_heads(spec)
    if isinstance(spec, MLAAttentionSpec):
        return 1
    # With fewer heads than ranks each rank has a copy of one.
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    heads = compat.num_heads(spec)
    return total if total < ranks and heads == 1 else heads * ranks


def _shards(vllm_config: Any, spec: Any, wanted: int) -> int:
    heads = _heads(vllm_config, spec)
    if not _is_cut(spec):
        return heads
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    shards = shard_count(heads, min(ranks, heads), wanted)
    # Every rank would find out; the scheduler is to know before.
    portion(heads, shards, ranks, 0)
    return shards


def _group_facts(vllm_config: Any, spec: Any) -> list[object]:
    if not _is_cut(spec):
        return [repr(spec)]
    return [
        type(spec).__name__,
        _heads(vllm_config, spec),
        spec.head_size,
        spec.head_size_v,
        str(spec.dtype),
        compat.kv_quant_mode(spec),
        _window(spec),
        compat.state_content_size_bytes(spec),
        compat.tokens_per_state(spec),
    ]


def _draft_identity(vllm_config: Any, *, named: bool) -> str:
    """The identity of the draft model if its layers' KV is stored with the model's own, else empty."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_STATE:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or speculative.method == "custom_class":
        return f"{speculative.method}/{speculative.model}"
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    try:
        weights = weights_identity(draft, load, vllm_config.parallel_config)
    except ConfigError:
        if not named:
            raise
        weights = f"{draft.model}@{draft.revision}"
    return f"{speculative.method}/{weights}/{config_digest(draft, named=True)}"


def _multimodal(model: Any) -> str:
    """Settings that change how images, sounds and videos are processed; their hashes do not cover these."""
    config = getattr(model, "multimodal_config", None)
    return "" if config is None else plain_text({name: getattr(config, name, None) for name in _MULTIMODAL})


def _device_identity(vllm_config: Any) -> str:
    """The kind of device, and on a CPU its vector instructions: the attention kernels pack blocks by them.

    Raises ConfigError: the release of the kernels is not known.
    """
    kind = str(vllm_config.device_config.device_type)
    if kind == "cpu":
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    name = f"{kind}/{current_platform.get_device_name()}"
    if kind != "npu":
        return name
    try:
        return f"{name}/vllm-ascend {importlib.metadata.version('vllm-ascend')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "the kernels for NPUs are those of vllm-ascend, whose release is not known; install it as a package"
        ) from error


def _rope_length(model: Any) -> int:
    """The context length where the position embedding depends on it (LongRoPE picks its factors by it), else 0."""
    return int(model.max_model_len) if "longrope" in model.hf_config.to_json_string(use_diff=False) else 0
