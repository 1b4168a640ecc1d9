"""From the settings of a tier to the tier."""

from __future__ import annotations

from ems.errors import ConfigError
from ems.pool.tiers.cluster.tier import open_cluster
from ems.pool.tiers.pack_seal import given_seal_key
from ems.pool.tiers.packs import open_packs
from ems.pool.tiers.seam import Tier
from ems.pool.tiers.settings import TierConfig


def open_tier(config: TierConfig, *, for_tenants: bool = False) -> Tier:
    """The tier that ``config`` describes, of a node that serves tenants or not; nothing of it was read yet.

    Raises ConfigError: it cannot be used.
    """
    if config.kind != "mooncake":
        return open_packs(config)
    seal_key = given_seal_key(config)
    if for_tenants and seal_key is None:
        raise ConfigError(
            f"{config.name} has no seal, so that whoever reaches the cluster could plant pages of any tenant: give "
            "seal_key=FILE, a secret of all its nodes ('openssl rand -base64 32 > FILE && chmod 600 FILE')"
        )
    return open_cluster(config, seal_key)
