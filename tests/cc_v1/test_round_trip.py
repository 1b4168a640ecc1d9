"""What was saved is loaded again, bit for bit, whatever the engine's memory looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ems import CcKvOption, Ems
from ems.cc_v1.cc_config import KVCacheType
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import integer_key
from ems.pool.protocol import coding, messages
from tests.cc_v1.conftest import NEVER, OPTION, make_caches, same, tokens, zeros_like
from tests.kit.node import NodeProcess

if TYPE_CHECKING:
    from ems.cc_v1.context_caching import ContextCaching
    from tests.cc_v1.conftest import Caches, Connect

HASHES = [-3, 1 << 200, 0, -(1 << 99)]


def save(cc: ContextCaching, slots: Any, hashes: list[int], offsets: list[int]) -> int:
    result = cc.get_result(cc.async_save(slots, hashes, offsets, OPTION))
    assert result.total == len(hashes)
    return result.success


def load(cc: ContextCaching, slots: Any, hashes: list[int], offsets: list[int]) -> int:
    result = cc.get_result(cc.async_load(slots, hashes, offsets, OPTION))
    assert result.total == len(hashes)
    return result.success


def kv_in_one(caches: Caches) -> Caches:
    """K and V as views of one tensor ``[blocks, 2, ...]``: blocks lie apart."""
    both = [torch.stack(layer, dim=1) for layer in caches]
    return [[tensor[:, 0], tensor[:, 1]] for tensor in both]


def heads_first(caches: Caches) -> Caches:
    """Memory ordered by head, seen by token."""
    return [[t.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for t in layer] for layer in caches]


def last_strided(caches: Caches) -> Caches:
    """Not even the values of one head lie side by side."""
    return [[torch.stack([t, t], dim=-1)[..., 0] for t in layer] for layer in caches]


def as_inference(caches: Caches) -> Caches:
    """Tensors made in inference mode, as engines do."""
    with torch.inference_mode():
        return [[tensor.clone() for tensor in layer] for layer in caches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("view", [list, kv_in_one, heads_first, last_strided, as_inference], ids=lambda f: f.__name__)
def test_any_type_and_strides_come_back(node: NodeProcess, connect: Connect, dtype: Any, view: Any) -> None:
    cc = connect(node)
    caches = view(make_caches(dtype))
    cc.register_kvcache(caches)
    slots = list(range(8, 24))

    assert save(cc, slots, HASHES, [4] * 4) == 4
    assert cc.exists(HASHES, OPTION).success == 4

    other = view(zeros_like(make_caches(dtype)))
    cc.register_kvcache(other)
    there = [3, 1, 0, 2, *range(12, 16), 30, 31, 28, 29, *range(16, 20)]

    assert load(cc, there, HASHES, [4] * 4) == 4
    assert same(tokens(other, there), tokens(caches, slots))
    untouched = sorted(set(range(32)) - set(there))
    assert not any(part.any() for part in tokens(other, untouched))


def test_one_layout_reads_what_another_wrote(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    caches = make_caches(torch.bfloat16)
    cc.register_kvcache(heads_first(caches))
    save(cc, list(range(16)), HASHES, [4] * 4)
    other = kv_in_one(zeros_like(caches))
    cc.register_kvcache(other)

    assert load(cc, list(range(16)), HASHES, [4] * 4) == 4
    assert same(tokens(other, range(16)), tokens(caches, range(16)))


def test_a_page_is_every_layers_k_and_v_token_by_token(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    caches = make_caches(torch.float16)
    cc.register_kvcache(last_strided(caches))
    save(cc, [7, 5, 4, 6], [42], [4])
    transfers = cc.transfers
    assert transfers is not None

    client = PoolClient(node.config.socket)
    hits = client.lookup(transfers.namespace, integer_key(42, transfers.namespace.name), lease=True)
    assert hits.lease is not None
    page = bytes(client.segments(hits.lease.epoch).page(hits.lease.refs[0], transfers.namespace.page_size))
    client.close()

    expected = b"".join(part.numpy().tobytes() for part in tokens(caches, [7, 5, 4, 6]))
    assert page == expected


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda slots: np.array(slots, dtype=np.int32),
        torch.tensor,
        lambda slots: torch.tensor(slots, dtype=torch.int32),
        lambda slots: torch.stack([torch.tensor(slots)] * 2, dim=1)[:, 0],
    ],
    ids=["list", "tuple", "int64 array", "int32 array", "int64 tensor", "int32 tensor", "strided tensor"],
)
def test_slot_mappings_of_any_kind(node: NodeProcess, connect: Connect, form: Any) -> None:
    cc = connect(node)
    caches = make_caches()
    cc.register_kvcache(caches)
    assert save(cc, form([9, 8, 3, 30]), [1], [4]) == 1
    other = zeros_like(caches)
    cc.register_kvcache(other)
    assert load(cc, form([0, 1, 2, 3]), [1], [4]) == 1
    assert same(tokens(other, [0, 1, 2, 3]), tokens(caches, [9, 8, 3, 30]))


def test_the_caller_may_change_its_slot_mapping_at_once(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    caches = make_caches()
    cc.register_kvcache(caches)
    slots = torch.arange(4)
    future = cc.async_save(slots, [1], [4], OPTION)
    slots += 8
    cc.get_result(future)
    other = zeros_like(caches)
    cc.register_kvcache(other)
    load(cc, [0, 1, 2, 3], [1], [4])
    assert same(tokens(other, range(4)), tokens(caches, range(4)))


def test_a_load_stops_at_the_first_block_that_is_missing(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    caches = make_caches()
    cc.register_kvcache(caches)
    save(cc, range(4), [1], [4])
    save(cc, range(8, 12), [3], [4])
    other = zeros_like(caches)
    cc.register_kvcache(other)

    assert cc.exists([1, 2, 3], OPTION).success == 1
    assert load(cc, range(12), [1, 2, 3], [4] * 3) == 1
    assert same(tokens(other, range(4)), tokens(caches, range(4)))
    assert not any(part.any() for part in tokens(other, range(4, 12)))
    assert load(cc, range(4), [2], [4]) == 0


def test_the_first_commit_stays(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    caches = make_caches()
    cc.register_kvcache(caches)
    assert save(cc, range(4), [1], [4]) == 1
    assert save(cc, range(4, 8), [1], [4]) == 1
    other = zeros_like(caches)
    cc.register_kvcache(other)
    load(cc, range(4), [1], [4])
    assert same(tokens(other, range(4)), tokens(caches, range(4)))


def test_a_page_that_somebody_else_is_writing_counts_as_saved(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    cc.register_kvcache(make_caches())
    transfers = cc.transfers
    assert transfers is not None
    other = PoolClient(node.config.socket)
    key = integer_key(1, transfers.namespace.name)
    reservation = other.reserve(transfers.namespace, bytes(16), [key])
    assert reservation.granted

    assert save(cc, range(8), [1, 2], [4, 4]) == 2
    assert cc.exists([1, 2], OPTION).success == 0
    other.commit(reservation)
    assert cc.exists([1, 2], OPTION).success == 2
    other.close()


class TestPartialBlocks:
    def test_the_last_block_may_lack_tokens(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        caches = make_caches()
        cc.register_kvcache(caches)
        assert save(cc, range(7), [1, 2], [4, 3]) == 2
        other = zeros_like(caches)
        cc.register_kvcache(other)

        assert cc.exists([1, 2], OPTION).success == 2
        assert load(cc, range(7), [1, 2], [4, 3]) == 2
        assert same(tokens(other, range(7)), tokens(caches, range(7)))
        assert not any(part.any() for part in tokens(other, range(7, 32)))

    def test_more_tokens_than_the_page_has_are_a_miss(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        caches = make_caches()
        cc.register_kvcache(caches)
        save(cc, range(2), [1], [2])
        other = zeros_like(caches)
        cc.register_kvcache(other)

        assert load(cc, range(4), [1], [4]) == 0
        assert load(cc, range(3), [1], [3]) == 0
        assert not any(part.any() for part in tokens(other, range(32)))
        assert load(cc, range(1), [1], [1]) == 1
        assert same(tokens(other, [0]), tokens(caches, [0]))

    def test_a_whole_block_serves_its_beginning(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        caches = make_caches()
        cc.register_kvcache(caches)
        save(cc, range(4), [1], [4])
        other = zeros_like(caches)
        cc.register_kvcache(other)
        assert load(cc, range(3), [1], [3]) == 1
        assert same(tokens(other, range(3)), tokens(caches, range(3)))
        assert not any(part.any() for part in tokens(other, [3]))

    def test_a_block_that_grew_whole_is_stored_beside_its_beginning(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        caches = make_caches()
        cc.register_kvcache(caches)
        save(cc, range(2), [1], [2])
        assert save(cc, range(4), [1], [4]) == 1
        other = zeros_like(caches)
        cc.register_kvcache(other)
        assert load(cc, range(4), [1], [4]) == 1
        assert same(tokens(other, range(4)), tokens(caches, range(4)))

    def test_a_beginning_is_not_stored_beside_the_whole(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        cc.register_kvcache(make_caches())
        transfers = cc.transfers
        assert transfers is not None
        save(cc, range(4), [1], [4])
        assert save(cc, range(2), [1], [2]) == 1
        client = PoolClient(node.config.socket)
        assert client.lookup(transfers.namespace, transfers.names.beginning(1)).count == 0
        client.close()

    def test_tokens_smaller_than_the_note(self, node: NodeProcess, connect: Connect) -> None:
        """The note of how many tokens there are must not overwrite one."""
        cc = connect(node)
        caches = make_caches(torch.int8, layers=1, heads=1, size=1)
        cc.register_kvcache(caches)
        assert save(cc, range(7), [1, 2], [4, 3]) == 2
        other = zeros_like(caches)
        cc.register_kvcache(other)
        assert load(cc, range(7), [1, 2], [4, 3]) == 2
        assert same(tokens(other, range(7)), tokens(caches, range(7)))


class TestNamespaces:
    def other_sees_it(self, node: NodeProcess, connect: Connect, first: dict[str, Any], second: dict[str, Any]) -> bool:
        """Whether a rank ``second`` finds what a rank ``first`` saved."""
        found = []
        for facts in (first, second):
            rank = dict(facts)
            dtype, kind = rank.pop("dtype", torch.float32), rank.pop("kvcache_type", KVCacheType.MHA)
            shape = rank.pop("shape", {})
            cc = connect(node, health=NEVER, **rank)
            cc._config.cc_config_v1.kvcache_type = kind
            cc.register_kvcache(make_caches(dtype, **shape))
            found.append(cc.exists([1], OPTION).success)
            if facts is not second:
                save(cc, range(4), [1], [4])
        assert found[0] == 0
        return found[1] == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"model_id": "another"},
            {"llm_engine": "vllm@another"},
            {"access_id": "somebody"},
            {"dtype": torch.int32},
            {"shape": {"layers": 3}},
            {"shape": {"heads": 4, "size": 4}},
            {"shape": {"heads": 1, "block_size": 8}},
            {"tp_world_size": 4, "rank_in_tp_group": 0},
            {"pp_world_size": 2, "rank_in_pp_group": 0},
            {"kvcache_type": KVCacheType.MLA},
        ],
        ids=lambda change: "-".join(str(key) for key in (change.get("shape") or change)),
    )
    def test_what_differs_is_kept_apart(self, node: NodeProcess, connect: Connect, change: dict[str, Any]) -> None:
        model = {"model_id": f"apart {change}"}
        assert not self.other_sees_it(node, connect, model, model | change)

    def test_ranks_of_a_group_hold_shards_of_their_own(self, node: NodeProcess, connect: Connect) -> None:
        group = {"model_id": "shards", "tp_world_size": 2}
        assert not self.other_sees_it(
            node, connect, group | {"rank_in_tp_group": 0}, group | {"rank_in_tp_group": 1, "rank_id": 1}
        )

    def test_an_mla_latent_is_stored_once_for_all_ranks(self, node: NodeProcess, connect: Connect) -> None:
        latent = {"model_id": "latent", "kvcache_type": KVCacheType.MLA}
        prefill = {"tp_world_size": 8, "rank_in_tp_group": 5, "rank_id": 5, "device_id": 5}
        assert self.other_sees_it(node, connect, latent | prefill, latent)

    def test_names_with_slashes_do_not_run_together(self, node: NodeProcess, connect: Connect) -> None:
        assert not self.other_sees_it(
            node, connect, {"access_id": "a/b", "model_id": "c"}, {"access_id": "a", "model_id": "b/c"}
        )

    def test_another_rank_on_the_same_place_reads_it(self, node: NodeProcess, connect: Connect) -> None:
        assert self.other_sees_it(node, connect, {"model_id": "shared"}, {"model_id": "shared", "device_id": 3})


@pytest.mark.parametrize(
    ("option", "local_only", "cluster_write"),
    [
        (CcKvOption(write_rcache=True, read_local_only=False, timeout=5000), False, "on_save"),
        (CcKvOption(write_rcache=False, read_local_only=False, timeout=5000), False, "never"),
        (CcKvOption(write_rcache=1, read_local_only=1, timeout=5000), True, "on_save"),  # type: ignore[arg-type]
        (CcKvOption(), False, "on_save"),
        (None, False, ""),
    ],
)
def test_options_about_other_nodes_reach_this_one(
    node: NodeProcess,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    option: CcKvOption | None,
    local_only: bool,
    cluster_write: str,
) -> None:
    asked: list[messages.Request] = []
    encode = coding.encode_request

    def encode_request(request: messages.Request, version: int) -> bytes:
        asked.append(request)
        return encode(request, version)

    cc = connect(node)
    cc.register_kvcache(make_caches())
    monkeypatch.setattr(coding, "encode_request", encode_request)
    assert cc.get_result(cc.async_save(range(6), [1, 2], [4, 2], option)).success == 2
    assert cc.exists([1, 2], option).success == 2
    assert cc.get_result(cc.async_load(range(6), [1, 2], [4, 2], option)).success == 2
    lookups = [request.local_only for request in asked if isinstance(request, messages.Lookup)]
    assert lookups == [local_only] * 5
    assert {request.cluster_write for request in asked if isinstance(request, messages.Commit)} == {cluster_write}
    assert Ems.check_health()


def test_nothing_to_do_is_done_at_once(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    cc.register_kvcache(make_caches())
    future = cc.async_load([], [], [], OPTION)
    assert bool(future) is True
    assert cc.is_ready(future)
    assert cc.get_result(future).success == 0
    assert cc.exists([], OPTION).success == 0
