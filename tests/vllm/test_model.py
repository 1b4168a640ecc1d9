"""Which engines are served, which are refused by name, and what makes two engines' pages different."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import ParallelConfig
from vllm.config.load import LoadConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ems.errors import ConfigError
from ems.vllm import compat
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.model import describe, local_planes
from ems.vllm.planes import Portion


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
        "hf_config_path": None,
        "hf_overrides": {},
        "quantization_config": None,
        "model_weights": "",
        "trust_remote_code": False,
        "code_revision": None,
        "multimodal_config": None,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in parallel.items()}),
        speculative_config=changes.get("speculative_config"),
        load_config=LoadConfig(**changes.get("load", {})),
        model_config=SimpleNamespace(
            **{key: changes.get(key, value) for key, value in model.items()},
            hf_config=HfConfig(**changes.get("hf", {})),
            hf_text_config=SimpleNamespace(num_hidden_layers=3),
            get_total_num_kv_heads=lambda: changes.get("kv_heads", 2),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("cache_dtype", "auto"),
            calculate_kv_scales=False,
            kv_cache_dtype_skip_layers=changes.get("skip_layers", []),
        ),
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


SETTINGS = ConnectorSettings(saves=True, socket=Path("node.sock"), directory=Path())


def test_an_engine_with_adapters_says_by_which_name_it_serves_the_model_itself(folder: Path) -> None:
    config = make_config(folder)
    plain = describe(config, make_groups(make_spec()), SETTINGS)
    config.lora_config = SimpleNamespace(max_loras=1)
    config.model_config.served_model_name = "base"
    served = describe(config, make_groups(make_spec()), SETTINGS)
    assert (plain.facts.get("serves"), served.facts["serves"]) == (None, "base")
    assert served.identity == plain.identity


def name_of(folder: Path, kv: KVCacheConfig | None = None, **changes: Any) -> str:
    return describe(make_config(folder, **changes), kv or make_groups(make_spec()), SETTINGS).identity


def test_a_block_has_a_page_for_each_head(folder: Path) -> None:
    model = describe(make_config(folder), make_groups(make_spec()), SETTINGS)

    assert [(plane.group, plane.shards, plane.window) for plane in model.planes] == [(0, 2, 0)]
    assert (model.block_size, model.num_blocks, model.groups) == (16, 10, 1)


def test_the_same_engine_twice_has_the_same_pages(folder: Path) -> None:
    assert name_of(folder) == name_of(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"cache_dtype": "fp8"},
        {"skip_layers": ["5"]},
        {"quantization": "awq"},
        {"quantization_config": {"linear": "fp8"}},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})},
        {"load": {"load_format": "dummy"}},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"backend": "other"},
    ],
    ids=str,
)
def test_another_way_to_run_has_other_pages(folder: Path, changes: dict[str, Any]) -> None:
    assert name_of(folder, **changes) != name_of(folder)


def test_another_configuration_has_other_pages(folder: Path) -> None:
    before = name_of(folder)
    (folder / "config.json").write_text('{"rope_theta": 500000}')

    assert name_of(folder) != before


def test_a_configuration_that_changes_while_the_model_loads_is_the_same(folder: Path) -> None:
    """DeepSeek's models do so, in the workers but not in the scheduler, and these must speak of the same pages."""
    assert name_of(folder, hf={"rope_parameters": {"rope_type": "deepseek_yarn"}}) == name_of(
        folder, hf={"rope_parameters": {"rope_type": "yarn"}}
    )


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
        describe(config, kv, msgspec.structs.replace(SETTINGS, tenant=tenant, model_id=model_id)).identity
        for tenant in ("default", "other")
        for model_id in ("", "mine")
    }

    assert len(names) == 4


def test_the_context_length_matters_where_positions_depend_on_it(folder: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "longrope"}}
    assert name_of(folder, hf=rope, max_model_len=4096) != name_of(folder, hf=rope, max_model_len=131072)
    assert name_of(folder, max_model_len=4096) == name_of(folder, max_model_len=131072)


def test_ways_to_run_that_are_not_served_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--decode-context-parallel-size is 2"):
        describe(make_config(folder, decode_context_parallel_size=2), make_groups(make_spec()), SETTINGS)
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        describe(make_config(folder, pipeline_parallel_size=2), make_groups(make_spec(), sliding()), SETTINGS)


def test_cascade_attention_is_refused_where_the_engine_counts_references(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 0.31 it takes a block with as many references as requests for one that they share."""
    config = make_config(folder)
    config.model_config.disable_cascade_attn = False
    manager = type("FullAttentionManager", (), {})
    monkeypatch.setattr(compat, "single_type_kv_cache_manager", SimpleNamespace(FullAttentionManager=manager))
    assert describe(config, make_groups(make_spec()), SETTINGS).planes
    monkeypatch.setattr(manager, "get_num_common_prefix_blocks", lambda _: 0, raising=False)
    with pytest.raises(ConfigError, match="--no-disable-cascade-attn"):
        describe(config, make_groups(make_spec()), SETTINGS)


SIZES = {"tensor_parallel_size": 4, "data_parallel_size": 2, "data_parallel_size_local": 1}


@pytest.mark.parametrize(
    ("sizes", "hosts"),
    [
        ({"tensor_parallel_size": 2, "nnodes": 2}, 2),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, 2),
        ({**SIZES, "nnodes": 4}, 2),
        ({**SIZES, "nnodes": 2}, 1),
        ({**SIZES, "nnodes": 2, "tensor_parallel_size": 1, "data_parallel_external_lb": True}, 1),
    ],
    ids=["tensor parallel", "pipeline", "two hosts a data-parallel rank", "one each", "one each, balanced outside"],
)
def test_ranks_on_several_hosts_are_refused_but_data_parallel_ones(
    folder: Path, sizes: dict[str, Any], hosts: int
) -> None:
    config = make_config(folder, kv_heads=4)
    config.parallel_config = ParallelConfig(distributed_executor_backend="mp", **sizes)
    kv = make_groups(make_spec(num_kv_heads=4 // config.parallel_config.tensor_parallel_size))
    if hosts == 1:
        assert describe(config, kv, SETTINGS).planes
    else:
        with pytest.raises(ConfigError, match=f"ranks run on {hosts} hosts"):
            describe(config, kv, SETTINGS)


def sliding(**changes: Any) -> SlidingWindowSpec:
    facts = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, "sliding_window": 64}
    return SlidingWindowSpec(**{**facts, **changes})


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


CLEARS_MIXED = hasattr(KVCacheConfig, "has_mixed_precision_kv_cache")
"""Whether this release clears blocks of layers that differ in precision; 0.23 does not."""


def mixed() -> UniformTypeKVCacheSpecs:
    """One layer of three keeps more bits than the others."""
    dtypes = {0: torch.bfloat16, 1: torch.uint8, 2: torch.uint8}
    specs = {f"layer.0.{layer}": make_spec(dtype=dtype) for layer, dtype in dtypes.items()}
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)


def not_causal() -> FullAttentionSpec:
    spec = make_spec()
    object.__setattr__(spec, "non_causal", True)  # vLLM 0.23 has no such field
    return spec


def mamba(mode: str = "none") -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode)


@pytest.mark.skipif(not compat.HANDS_OVER_STATES, reason="this release does not say which blocks hold states")
def test_layers_that_keep_states_have_planes_of_whole_blocks(folder: Path) -> None:
    config = make_config(folder, tensor_parallel_size=2, kv_heads=4)
    model = describe(config, make_groups(mamba("align"), make_spec(num_kv_heads=2)), SETTINGS)
    assert [(plane.group, plane.shards, plane.window, plane.state) for plane in model.planes] == [
        (1, 4, 0, False),
        (0, 2, 1, True),
    ]
    assert (model.page_blocks, model.fails_whole) == (1, True)


@pytest.mark.skipif(not compat.HANDS_OVER_STATES, reason="it is refused as a whole there")
@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_are_not_at_the_ends_of_blocks_are_refused(folder: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=f"in the mode '{mode}', but EmsStoreConnector serves 'align'; start with"):
        describe(make_config(folder), make_groups(make_spec(), mamba(mode)), SETTINGS)


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        pytest.param(make_groups, "no KV cache", id="no attention"),
        pytest.param(lambda: make_groups(make_spec(), mamba()), "state-space layers", id="state space"),
        pytest.param(lambda: make_groups(make_spec(attention_chunk_size=64)), "chunks of 64", id="chunked attention"),
        pytest.param(
            lambda: make_groups(make_spec(), sliding(block_size=32)), "block sizes [16, 32]", id="block sizes"
        ),
        pytest.param(lambda: make_groups(not_causal()), "a token sees later ones", id="not causal"),
        *([pytest.param(lambda: make_groups(mixed()), "differ in precision", id="mixed")] if CLEARS_MIXED else []),
    ],
)
def test_layers_that_are_not_served_are_refused_by_name(
    folder: Path, kv: Callable[[], KVCacheConfig], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        describe(make_config(folder), kv(), SETTINGS)

    assert named in str(error.value)


def test_a_result_made_from_all_tokens_states_is_refused(folder: Path) -> None:
    pooled = make_config(folder)
    pooled.model_config.pooler_config = SimpleNamespace(seq_pooling_type="MEAN")
    pooled.model_config.is_prefix_caching_supported = False
    with pytest.raises(ConfigError, match="from the states of all tokens"):
        describe(pooled, make_groups(make_spec()), SETTINGS)
    pooled.model_config.is_prefix_caching_supported = True
    assert describe(pooled, make_groups(make_spec()), SETTINGS).planes


@pytest.mark.parametrize(
    ("specs", "planes"),
    [
        ([mla()], [(0, 1, 0)]),
        ([sliding()], [(0, 2, 64)]),
        # Searches begin with what needs all blocks.
        ([sliding(), make_spec()], [(1, 2, 0), (0, 2, 64)]),
        ([make_spec(sliding_window=64)], [(0, 2, 0)]),
    ],
    ids=["MLA", "sliding window", "mixed", "window in full attention"],
)
def test_every_kind_of_attention_has_its_planes(
    folder: Path, specs: list[Any], planes: list[tuple[int, int, int]]
) -> None:
    model = describe(make_config(folder), make_groups(*specs), SETTINGS)

    assert [(plane.group, plane.shards, plane.window) for plane in model.planes] == planes


@pytest.mark.parametrize("spec", [make_spec, mla], ids=["GQA", "MLA"])
def test_the_pages_do_not_depend_on_the_tensor_parallel_size(folder: Path, spec: Callable[[], Any]) -> None:
    one = describe(make_config(folder), make_groups(spec()), SETTINGS)
    local = 1 if spec is make_spec else spec().num_kv_heads
    config = make_config(folder, tensor_parallel_size=2)
    kv = make_groups(dataclasses.replace(spec(), num_kv_heads=local))
    two = describe(config, kv, SETTINGS)
    assert two.planes == one.planes

    parts = [local_planes(two, config, kv, rank, 0)[0].portion for rank in range(2)]
    if spec is mla:
        assert parts == [Portion(0, 1, 0, 2), Portion(0, 1, 1, 2)]
    else:
        assert parts == [Portion(0, 1), Portion(1, 1)]


def test_each_stage_has_a_plane_of_its_own(folder: Path) -> None:
    config, kv = make_config(folder, pipeline_parallel_size=2), make_groups(make_spec())
    model = describe(config, kv, SETTINGS)

    assert [plane.stage for plane in model.planes] == [0, 1]
    assert len({plane.namespace for plane in model.planes}) == 2
    assert [local.number for local in local_planes(model, config, kv, 0, 1)] == [1]


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_drafting_without_state_of_its_own_shares_pages_with_engines_that_do_not_draft(
    folder: Path, method: str
) -> None:
    target = make_config(folder).model_config
    drafting = SimpleNamespace(method=method, model=method, draft_model_config=target)
    assert name_of(folder, speculative_config=drafting) == name_of(folder)


def test_another_draft_model_with_state_has_other_pages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = {name_of(folder)}
    for content in (b"one" * 1000, b"two" * 1000):
        place = tmp_path_factory.mktemp("draft")
        (place / "model.safetensors").write_bytes(content)
        draft = make_config(place).model_config
        for method in ("eagle3", "draft_model"):
            drafting = SimpleNamespace(method=method, model=str(place), draft_model_config=draft)
            names.add(name_of(folder, speculative_config=drafting))
            (place / "config.json").write_text(f'{{"rope_theta": {len(names)}}}')
    assert len(names) == 5


def test_a_draft_model_within_the_files_of_the_model_is_named_by_these(folder: Path) -> None:
    one = SimpleNamespace(method="mtp", model=str(folder), draft_model_config=make_config(folder).model_config)
    other = folder.with_name("linked")
    other.symlink_to(folder)
    moved = SimpleNamespace(method="mtp", model=str(other), draft_model_config=make_config(other).model_config)
    assert name_of(folder, speculative_config=one) == name_of(folder, speculative_config=moved) != name_of(folder)


def test_a_streamed_draft_model_needs_no_name_beside_the_model_s(folder: Path) -> None:
    """A wrong draft costs accepted tokens, never a wrong one."""
    draft = make_config(folder, model="s3://bucket/draft").model_config
    drafting = SimpleNamespace(method="eagle", model="s3://bucket/draft", draft_model_config=draft)
    config, kv = make_config(folder, speculative_config=drafting), make_groups(make_spec())
    with pytest.raises(ConfigError, match="set model_id"):
        describe(config, kv, SETTINGS)
    assert describe(config, kv, msgspec.structs.replace(SETTINGS, model_id="mine")).planes


def test_what_the_user_says_of_the_model_must_be_so(folder: Path) -> None:
    declared = msgspec.structs.replace(SETTINGS, kvcache_type="MLA")
    with pytest.raises(ConfigError, match="kvcache_type is 'MLA', but the model's attention is MHA"):
        describe(make_config(folder), make_groups(make_spec()), declared)
    assert describe(make_config(folder), make_groups(mla()), declared).planes


def test_a_tensor_parallel_size_that_does_not_fit_is_refused_by_every_side(folder: Path) -> None:
    with pytest.raises(ConfigError, match="set store_tp_size to a multiple of 2"):
        describe(
            make_config(folder, tensor_parallel_size=2),
            make_groups(make_spec(num_kv_heads=1)),
            msgspec.structs.replace(SETTINGS, store_tp_size=1),
        )


def test_engines_can_be_set_apart(folder: Path) -> None:
    other = msgspec.structs.replace(SETTINGS, namespace="ds_default_ns_002")
    one = describe(make_config(folder), make_groups(make_spec()), SETTINGS)
    assert describe(make_config(folder), make_groups(make_spec()), other).identity != one.identity
