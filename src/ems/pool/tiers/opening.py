"""From settings to a tier that can be used."""

from __future__ import annotations

import os
from pathlib import Path

from ems.errors import ConfigError
from ems.pool.tiers.blobs import Blobs
from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.pack_seal import SealKeys, default_seal_key, make_key, read_keys
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig


def open_blobs(config: TierConfig) -> Blobs:
    """The place of a tier.

    Raises:
        ConfigError: it cannot be used.
    """
    if config.kind == "dir":
        return FolderBlobs(Path(config.place), sync=config.sync)
    from ems.pool.tiers.object_store import BucketBlobs

    return BucketBlobs(config)


def open_keys(config: TierConfig, *, make: bool = True) -> SealKeys | None:
    """What seals the pages of the tier.

    The key of a folder that names none is made where there is none yet; None without ``make``.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if config.key is not None:
        return read_keys(config.key, encrypts=True)
    path = config.seal_key or (default_seal_key() if config.kind == "dir" or "EMS_SEAL_KEY" in os.environ else None)
    if path is None:
        raise ConfigError(
            f"{config.name} can be written by more than this node: give seal_key=FILE, a secret of all its nodes "
            "('openssl rand -base64 32 > FILE && chmod 600 FILE')"
        )
    if config.kind == "dir" and config.seal_key is None:
        if make:
            make_key(path)
        elif not path.exists():
            return None
    return read_keys(path, encrypts=False)


def open_tier(config: TierConfig) -> PackTier:
    """The tier that ``config`` describes; nothing of it was read yet.

    Raises:
        ConfigError: it cannot be used.
    """
    compressor = Compressor(config.element) if config.compress == "zstd" else None
    keys = open_keys(config)
    assert keys is not None
    return PackTier(config.name, open_blobs(config), keys, limit=config.size, ttl=config.ttl, compressor=compressor)
