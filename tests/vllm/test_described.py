"""What a node makes of an engine's description: the keys under which the engine's connector looks for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from ems.pool.keys import split_keys
from ems.pool.names import qualified
from ems.pool.prompts import described_plane
from ems.vllm import compat
from ems.vllm.epoch import KeyEpoch
from ems.vllm.lookups import LookupJob, Lookups
from ems.vllm.model import BlockModel, describe
from ems.vllm.waiting import Waiting
from tests.vllm.test_model import SETTINGS, make_config, make_groups, make_spec
from tests.vllm.test_search import Shelf

if TYPE_CHECKING:
    from ems.pool.client.pool_client import PoolClient
    from ems.vllm.reporting.observer import Observer

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=40)
STATE = MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "one": (make_spec(),),
    "several heads": (make_spec(num_kv_heads=4),),
    "windows": (make_spec(), WINDOW, WINDOW),
    "states": (STATE, make_spec(), STATE),
    "blocks of two sizes": (make_spec(), make_spec(block_size=32)),
}
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 256, 511, 512, 513, 640]


def make_model(folder: Path, layout: str, **settings: Any) -> BlockModel:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    groups = make_groups(*LAYOUTS[layout])
    offloaded = range(len(LAYOUTS[layout])) if layout == "blocks of two sizes" else None
    return describe(make_config(folder), groups, msgspec.structs.replace(SETTINGS, **settings), offloaded)


def fetched(model: BlockModel, epoch: KeyEpoch, tokens: Sequence[int]) -> dict[str, list[bytes]]:
    """The keys that a node makes of ``tokens`` by the engine's description, by namespace."""
    made = {}
    for name, facts in model.descriptions(epoch.chain_name).items():
        plane = described_plane(qualified("acme", name), facts)
        assert plane is not None
        chain, chunks = plane.chain(), plane.full_chunks(len(tokens))
        chain.extend(tokens, blocks=chunks)
        made[name] = split_keys(plane.keys(chain, plane.first_in_sight(chunks)))
    return made


def found(model: BlockModel, epoch: KeyEpoch, tokens: Sequence[int], shelf: Shelf) -> int:
    """How many leading ``tokens`` the connector finds on ``shelf``."""
    observer = SimpleNamespace(usable=True, seconds_a_token=0.0)
    lookups = Lookups(
        SETTINGS,
        cast("PoolClient", shelf),
        model.planes,
        model.chunk_tokens,
        epoch.chain_name,
        cast("Observer", observer),
        tails=False,
    )
    job = LookupJob("r", tokens, lambda _size: (), Waiting(0.0, 0))
    return lookups._search.take(lookups._name_chunks(job)).tokens


@pytest.mark.parametrize("version", ["", "2"])
@pytest.mark.parametrize(("layout", "chunk_tokens"), [*((name, 0) for name in LAYOUTS), ("several heads", 64)])
def test_what_a_node_fetches_is_what_the_connector_looks_for(
    layout: str, chunk_tokens: int, version: str, tmp_path: Path
) -> None:
    if layout == "states" and not compat.HANDS_OVER_STATES:
        pytest.skip("this release does not say which blocks hold states")
    model = make_model(tmp_path, layout, chunk_tokens=chunk_tokens)
    epoch = KeyEpoch(model.identity, version, lambda: "drawn")
    for length in LENGTHS:
        tokens, shelf = range(length), Shelf()
        shelf.pages = fetched(model, epoch, tokens)
        states = any(plane.state for plane in model.planes)
        assert found(model, epoch, tokens, shelf) == (length - states) // model.chunk_tokens * model.chunk_tokens
        for name in shelf.pages:
            less = Shelf()
            less.pages = {other: keys[1:] if other == name else keys for other, keys in shelf.pages.items()}
            assert not shelf.pages[name] or found(model, epoch, tokens, less) < length - states


def test_a_version_that_has_no_room_for_its_name_is_no_mistake(tmp_path: Path) -> None:
    model = make_model(tmp_path, "one")
    (facts,) = model.descriptions(KeyEpoch(model.identity, "2" * 9000, str).chain_name).values()
    assert facts["chain"].startswith("sha256:")
