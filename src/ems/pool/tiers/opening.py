"""From the settings of a tier to the tier."""

from __future__ import annotations

from ems.pool.tiers.cluster.tier import open_cluster
from ems.pool.tiers.packs import open_packs
from ems.pool.tiers.seam import Tier
from ems.pool.tiers.settings import TierConfig


def open_tier(config: TierConfig) -> Tier:
    """The tier that ``config`` describes; nothing of it was read yet.  Raises ConfigError: it cannot be used."""
    return open_cluster(config) if config.kind == "mooncake" else open_packs(config)
