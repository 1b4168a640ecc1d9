"""What an engine tells the SDK about itself.

The names and the order of arguments are a contract; the keyword-only ones at the end of
:class:`EmsConfig` are this project's own additions.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ems.cc_v1.errors import invalid
from ems.cc_v1.health import HealthRules
from ems.pool.tenants.credentials import Credentials

if TYPE_CHECKING:
    from ems.config import NodeConfig


class KVCacheType(Enum):
    """What a layer's cache holds."""

    MHA = "MHA"
    """Keys and values by head; grouped-query attention counts here.  Ranks of a TP group hold different heads."""

    MLA = "MLA"
    """A latent that all ranks of a TP group hold alike; stored once, not once a rank."""


class CcConfig_v1:  # noqa: N801 - the contract's name
    """One rank of one engine.

    ``model_id`` is the operator's name for the weights, ``llm_engine`` reads ``engine@model name``.  The
    attribute ``kvcache_type`` may be set after construction, before the caches are registered.
    """

    def __init__(
        self,
        rank_id: int,
        device_id: int,
        model_id: str,
        tp_world_size: int,
        pp_world_size: int,
        rank_in_tp_group: int,
        rank_in_pp_group: int,
        llm_engine: str,
    ) -> None:
        self.rank_id = rank_id
        self.device_id = device_id
        self.model_id = model_id
        self.tp_world_size = tp_world_size
        self.pp_world_size = pp_world_size
        self.rank_in_tp_group = rank_in_tp_group
        self.rank_in_pp_group = rank_in_pp_group
        self.llm_engine = llm_engine
        self.kvcache_type = KVCacheType.MHA

    def __repr__(self) -> str:
        return f"CcConfig_v1({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            EmsException: EMS_INVALID_ARGUMENT, naming the argument.
        """
        for name in ("rank_id", "device_id", "rank_in_tp_group", "rank_in_pp_group"):
            _whole_number(name, getattr(self, name), least=0)
        for name in ("tp_world_size", "pp_world_size"):
            _whole_number(name, getattr(self, name), least=1)
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"rank_in_{kind}_group"), getattr(self, f"{kind}_world_size")
            if rank >= size:
                raise invalid(f"rank_in_{kind}_group is {rank}, expected less than {kind}_world_size, which is {size}")
        for name in ("model_id", "llm_engine"):
            _text(name, getattr(self, name), may_be_empty=False)
        if not isinstance(self.kvcache_type, KVCacheType):
            raise invalid(f"kvcache_type is {self.kvcache_type!r}, expected KVCacheType.MHA or KVCacheType.MLA")


class CcKvOption:
    """How one call is done; ``timeout`` in milliseconds.

    ``write_rcache`` also writes to other nodes and ``read_local_only`` keeps from reading there; both are
    accepted and change nothing as long as a node works alone.
    """

    def __init__(self, write_rcache: bool = True, read_local_only: bool = False, timeout: int = 5000) -> None:
        self.write_rcache = write_rcache
        self.read_local_only = read_local_only
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"CcKvOption({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class EmsConfig:
    """Who connects, as which rank, and to which node.

    ``access_id`` names the tenant (empty: ``default``).  ``autostart`` says whether a node is started when
    none runs on this host (the environment's ``EMS_AUTOSTART=0`` forbids it too); ``node`` names another node
    than this user's own, and how to start it; ``health`` and ``summary_seconds`` are for the impatient.
    """

    def __init__(
        self,
        access_id: str | None,
        access_key: str | None,
        cc_config_v1: CcConfig_v1,
        *,
        autostart: bool = True,
        node: NodeConfig | None = None,
        health: HealthRules | None = None,
        summary_seconds: float = 30.0,
    ) -> None:
        self.access_id = access_id
        self.access_key = access_key
        self.cc_config_v1 = cc_config_v1
        self.autostart = autostart
        self.node = node
        self.health = health or HealthRules()
        self.summary_seconds = summary_seconds

    def __repr__(self) -> str:
        return f"EmsConfig(access_id={self.access_id!r}, access_key='***', cc_config_v1={self.cc_config_v1!r})"

    @property
    def tenant(self) -> str:
        return self.access_id or "default"

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.access_id or "", self.access_key or "")

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            EmsException: EMS_INVALID_ARGUMENT, naming the argument.
        """
        for name in ("access_id", "access_key"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name), may_be_empty=True)
        if not isinstance(self.cc_config_v1, CcConfig_v1):
            raise invalid(f"cc_config_v1 is a {type(self.cc_config_v1).__name__}, expected a CcConfig_v1")
        if not self.summary_seconds > 0:
            raise invalid(f"summary_seconds is {self.summary_seconds!r}, expected a positive number")
        self.cc_config_v1.check()

    def identity(self) -> tuple[object, ...]:
        """Everything that a connection depends on; two configurations with equal identities are the same.

        The kind of cache is not part of it: it is asked for when caches are registered.
        """
        rank = {name: value for name, value in vars(self.cc_config_v1).items() if name != "kvcache_type"}
        return (
            self.tenant, self.access_key or "", tuple(rank.items()),
            self.autostart, self.node, self.health, self.summary_seconds,
        )  # fmt: skip


def _whole_number(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid(f"{name} is {value!r}, expected a whole number of at least {least}")


def _text(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, str):
        raise invalid(f"{name} is a {type(value).__name__}, expected text")
    if not value and not may_be_empty:
        raise invalid(f"{name} is empty, expected a name")
