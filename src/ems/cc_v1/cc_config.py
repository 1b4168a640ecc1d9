"""What an engine tells the SDK about itself.

The names and the order of arguments are a contract; the keyword-only ones at the end of
:class:`EmsConfig` are this project's own additions.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from ems.cc_v1.errors import invalid
from ems.config import NodeConfig
from ems.pool.client.health import HealthRules
from ems.pool.tenants.scram import Credentials

LONGEST_ID, LONGEST_MODEL = 128, 340
"""Characters of ``access_id``, and of ``model_id`` and ``llm_engine`` together: with the rest of it a namespace's name
is as long as a node allows."""


class KVCacheType(Enum):
    """What a layer's cache holds."""

    MHA = "MHA"
    """Keys and values by head; grouped-query attention counts here.  Ranks of a TP group hold different heads."""
    MLA = "MLA"
    """A latent that all ranks of a TP group hold alike; stored once, not once a rank."""


def _check_printable(name: str, given: str) -> None:
    if not given.isprintable():
        raise invalid(f"{name} has characters that cannot be printed: {given[:40]!a}")


@dataclass(eq=False)
class CcConfig_v1:  # noqa: N801 - the contract's name
    """One rank of one engine.

    ``model_id`` is the operator's name for the weights, ``llm_engine`` reads ``engine@model name``.  The
    attribute ``kvcache_type`` may be set after construction, before the caches are registered.
    """

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int
    pp_world_size: int
    rank_in_tp_group: int
    rank_in_pp_group: int
    llm_engine: str
    kvcache_type: KVCacheType = field(default=KVCacheType.MHA, init=False)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises EmsException: EMS_INVALID_ARGUMENT, naming the argument.
        """
        for name in ("rank_id", "device_id", "rank_in_tp_group", "rank_in_pp_group", "tp_world_size", "pp_world_size"):
            value, least = getattr(self, name), int(name.endswith("_size"))
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise invalid(f"{name} is {value!r}, expected a whole number of at least {least}")
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"rank_in_{kind}_group"), getattr(self, f"{kind}_world_size")
            if rank >= size:
                raise invalid(f"rank_in_{kind}_group is {rank}, expected less than {kind}_world_size, which is {size}")
        for name in ("model_id", "llm_engine"):
            if not isinstance(given := getattr(self, name), str) or not given:
                what = "empty" if given == "" else f"a {type(given).__name__}"
                raise invalid(f"{name} is {what}, expected a name")
            _check_printable(name, given)
        if (length := len(self.model_id) + len(self.llm_engine)) > LONGEST_MODEL:
            raise invalid(f"model_id and llm_engine have {length} characters, expected at most {LONGEST_MODEL}")
        if not isinstance(self.kvcache_type, KVCacheType):
            raise invalid(f"kvcache_type is {self.kvcache_type!r}, expected KVCacheType.MHA or KVCacheType.MLA")


@dataclass(eq=False)
class CcKvOption:
    """How one call is done; ``timeout`` in milliseconds.

    ``write_rcache`` gives what is saved to the node's cluster at once, or never; with ``read_local_only`` nothing is
    fetched from there.
    """

    write_rcache: bool = True
    read_local_only: bool = False
    timeout: int = 5000


@dataclass(eq=False)
class EmsConfig:
    """Who connects, as which rank, and to which node.

    ``access_id`` names the tenant (empty: ``default``).  ``autostart`` says whether a node is started when
    none runs on this host (the environment's ``EMS_AUTOSTART=0`` forbids it too); ``node`` names another node
    than this user's own, and how to start it; ``health`` and ``summary_seconds`` are for the impatient.
    """

    access_id: str | None
    access_key: str | None = field(repr=False)
    cc_config_v1: CcConfig_v1
    _: KW_ONLY
    autostart: bool = True
    node: NodeConfig | None = None
    health: HealthRules = field(default_factory=HealthRules)
    summary_seconds: float = 30.0

    @property
    def tenant(self) -> str:
        return self.access_id or "default"

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.access_id or "", self.access_key or "")

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises EmsException: EMS_INVALID_ARGUMENT, naming the argument.
        """
        for name in ("access_id", "access_key"):
            if not isinstance(getattr(self, name), str | None):  # which is shown to nobody
                raise invalid(f"{name} is a {type(getattr(self, name)).__name__}, expected text")
        _check_printable("access_id", self.tenant)
        if len(self.tenant) > LONGEST_ID:
            raise invalid(f"access_id has {len(self.tenant)} characters, expected at most {LONGEST_ID}")
        if not isinstance(self.cc_config_v1, CcConfig_v1):
            raise invalid(f"cc_config_v1 is a {type(self.cc_config_v1).__name__}, expected a CcConfig_v1")
        if not self.summary_seconds > 0:
            raise invalid(f"summary_seconds is {self.summary_seconds!r}, expected a positive number")
        self.cc_config_v1.check()

    def identity(self) -> tuple[object, ...]:
        """Everything that a connection depends on; two configurations with equal identities are the same.

        The kind of cache is not part of it: it is asked for when caches are registered.
        """
        rank = tuple((name, value) for name, value in vars(self.cc_config_v1).items() if name != "kvcache_type")
        return self.tenant, self.access_key or "", rank, self.autostart, self.node, self.health, self.summary_seconds
