"""From settings to a tier that can be used."""

from __future__ import annotations

from pathlib import Path

from ems.pool.tiers.blobs import Blobs
from ems.pool.tiers.cipher import Secrets
from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig

DEFAULT_SHARE = 0.5
"""Share of what is free in a folder that a tier without a size may take."""


def open_blobs(config: TierConfig) -> Blobs:
    """The place of a tier.

    Raises:
        ConfigError: it cannot be used.
    """
    if config.kind == "dir":
        return FolderBlobs(Path(config.place), sync=config.sync)
    from ems.pool.tiers.object_store import BucketBlobs

    return BucketBlobs(config)


def open_tier(config: TierConfig, blobs: Blobs | None = None) -> PackTier:
    """The tier that ``config`` describes; nothing of it was read yet.  ``blobs`` takes the place of its own.

    Raises:
        ConfigError: it cannot be used.
    """
    place = blobs or open_blobs(config)
    keys = Secrets(config.key) if config.key is not None else None
    compressor = Compressor(config.element) if config.compress == "zstd" else None
    return PackTier(
        config.name,
        place,
        limit=config.size,
        ttl=config.ttl,
        compressor=compressor,
        secrets_=keys,
        default_share=DEFAULT_SHARE if config.kind == "dir" else 0.0,
    )
