"""What a user may write in ``kv_connector_extra_config`` for the pool connector, with defaults and checks.

One set of keys serves all of the connector's names.  A wrong or contradictory value is refused with a sentence that
names key, value and expectation; an unknown key is reported and ignored, because files are shared between connectors;
a key that only steers another system's hardware or transport is accepted, all of them in one sentence.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

import msgspec

from ems.config import NodeConfig, default_directory, default_socket
from ems.errors import ConfigError
from ems.pool.pages import ClusterWrite
from ems.pool.tenants.scram import ACCESS_ID, ACCESS_KEY, Credentials
from ems.vllm.configuration.setting_values import FALSE, TRUE, SettingReader

ROLES = ("kv_producer", "kv_consumer", "kv_both")
MOONCAKE = "mooncake"
"""The one ``backend`` that means something: the memory of other hosts."""

WITHOUT_MEANING = frozenset(
    {
        # where the lookups of other pools listen; a lookup here needs no port
        "lookup_rpc_port", "mooncake_rpc_port", "lookup_key_server_ip", "lookup_key_server_base_port",
        # hardware, transports and how they are driven
        "register_buffer", "use_ascend_direct", "h2d_stagger_us", "block_group_size", "layerwise_max_transfer_blocks",
        "layerwise_max_transfer_bytes", "layerwise_prefetch_layers", "layerwise_num_shared_buffers",
        "layerwise_independent_layers",
        # how the other side is split; pages do not depend on it
        "prefill", "decode", "prefill_pp_size", "prefill_pp_layer_partition",
        # names of the service around the engine
        "service_name", "llm_engine",
    }
)  # fmt: skip
"""Keys of deployed files that mean nothing to this connector."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one connector."""

    saves: bool
    """Whether this engine stores what it computes (``kv_producer``, ``kv_both``; ``consumer_is_to_put`` too)."""
    loads: bool = True
    """Whether this engine loads what is stored; False only for a consumer by ``consumer_is_to_load``."""
    socket: Path
    """The node's socket; ``socket`` or ``EMS_SOCKET``."""
    directory: Path
    """Where a node that is started from here keeps its segments; ``directory`` or ``EMS_DIR``."""
    autostart: bool = True
    """Start a node when none runs; ``autostart`` or ``EMS_AUTOSTART``."""
    pool_size: int = 0
    """Bytes of a pool that is started from here, 0 for the node's default; ``pool_size`` or ``EMS_POOL_SIZE``."""
    backend: str = ""
    """What the user expects below the pool."""
    write_rcache: ClusterWrite = ""
    """When a cluster gets what this engine stores; empty: when the node says."""
    read_local_only: bool = False
    """Whether nothing is fetched over a network for this engine; like the other, a key or ``EMS_ENABLE_...``."""
    load_async: bool | None = None
    """Load between steps while the request waits, or (False, by itself with ``layerwise``) in the step that needs it.

    None is between steps, but for a short load of an engine that has nothing else to do."""
    layerwise: bool = False
    """Move a block layer by layer beside compute, instead of whole; ``use_layerwise``."""
    save_answers: bool = True
    """Store the blocks of the answer too, so that a conversation's next turn finds them; ``save_decode_cache``."""
    save_tails: bool = True
    """Store the last block also when it is not full; the contrary of ``discard_partial_chunks``."""
    min_reuse_tokens: int = 0
    """Do not load when fewer tokens could be reused; ``num_min_reuse_tokens`` or ``EMS_NUM_MIN_REUSE_TOKENS``."""
    min_load_blocks: int = 0
    """Load only when more blocks than this come; ``num_min_load_blocks`` or ``EMS_NUM_MIN_LOAD_BLOCKS``."""
    cost_model: bool = True
    """Do not load what is computed faster."""
    health_gate: bool = True
    """Stay away from a pool that failed until it was well for a while."""
    health_check: float = 10.0
    """Seconds between two checks of the pool's health; ``health_check_ms``."""
    tenant: str = "default"
    """Whose pages these are."""
    credentials: Credentials = Credentials()
    """What proves it to a node with tenants; ``access_id`` and ``access_key``, or ``ACCELERATE_ID`` and ``_KEY``."""
    model_id: str = ""
    """A name for the weights; empty derives one from the weight files."""
    weights_version: str = ""
    """What the user calls the weights that the engine starts with, where they are not those of the files."""
    namespace: str = ""
    """Set engines of equal models apart: pages of two namespaces never meet; ``namespace`` or ``MODEL_ID``."""
    chunk_tokens: int = 0
    """Tokens of which a page holds the state; 0 for 256, or a block that has more."""
    store_tp_size: int = 0
    """Parts by KV head that a block is stored in; 0 for as many as serve the usual tensor-parallel sizes."""
    kvcache_type: str = ""
    """``MHA`` (grouped queries too) or ``MLA`` where the user declared it, to be checked against the model."""
    on_error: str = "refuse"
    """What an engine does that cannot use the pool as configured: ``refuse`` to start, or ``serve_without``."""
    explain: bool = False
    """Say for each request how much was found, and why not more."""
    lookup_timeout: float = 1.0
    """Seconds after which a lookup that was not answered counts as a miss; ``lookup_timeout_ms``."""
    handoff_timeout: float = 2.0
    """Seconds that a decode waits for blocks that its prefill is still writing; ``handoff_timeout_ms``."""
    tier_timeout: float = 0.8
    """Seconds that a request waits for blocks that come up from tiers below memory, part of ``lookup_timeout``;
    ``tier_timeout_ms``."""
    call_timeout: float = 2.0
    """Seconds that one call to the node may take; ``call_timeout_ms``, ``EMS_CALL_TIMEOUT_MS`` or ``EMS_TIMEOUT``."""

    def node_config(self) -> NodeConfig:
        """A node that is started from here; of a cluster, unless the environment names its tiers."""
        file, master = (os.environ.get(name) for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"))
        named = self.backend == MOONCAKE and not os.environ.get("EMS_TIER") and (file or master)
        tiers = (f"mooncake:{quote(str(Path(file).absolute())) if file else ''}",) if named else ()
        place: Any = {"directory": self.directory, "socket": self.socket, "size": self.pool_size}
        return NodeConfig(**place, http_port=None, autostarted=True, tiers=tiers)


def reads_by_layer(extra: Mapping[str, Any]) -> bool:
    """Whether ``extra`` asks for layer-by-layer moves.  :func:`read_settings` refuses a wrong value."""
    try:
        return SettingReader(extra, {}).boolean("use_layerwise", default=False)
    except ConfigError:
        return False


def read_settings(
    kv_role: str | None, extra: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> tuple[ConnectorSettings, list[str]]:
    """Settings meant by ``extra`` for an engine with ``kv_role``, and a sentence for each thing that is ignored.

    Raises ConfigError: a value is wrong, or two contradict each other.
    """
    if kv_role not in ROLES:
        raise ConfigError(f"kv_role is {kv_role!r}, expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    reader = SettingReader(extra, os.environ if environment is None else environment)
    saves, loads = _directions(reader, kv_role)
    directory = Path(reader.text("directory") or default_directory())
    inside = directory / "node.sock" if extra.get("directory") else default_socket()
    layerwise = reader.boolean("use_layerwise", default=False)
    settings = ConnectorSettings(
        saves=saves,
        loads=loads,
        socket=Path(reader.text("socket", "EMS_SOCKET") or inside),
        directory=directory,
        autostart=reader.boolean("autostart", "EMS_AUTOSTART", default=True),
        pool_size=reader.size("pool_size", "EMS_POOL_SIZE"),
        backend=reader.text("backend").lower(),
        write_rcache=_write_rcache(reader),
        read_local_only=reader.boolean("read_local_only", "EMS_ENABLE_READ_LOCAL_ONLY", default=False),
        load_async=reader.boolean("load_async", default=False if layerwise else None),
        layerwise=layerwise,
        save_answers=reader.boolean("save_decode_cache", default=True),
        save_tails=not reader.boolean("discard_partial_chunks", default=False),
        min_reuse_tokens=reader.count("num_min_reuse_tokens", "EMS_NUM_MIN_REUSE_TOKENS", what="tokens"),
        min_load_blocks=reader.count("num_min_load_blocks", "EMS_NUM_MIN_LOAD_BLOCKS", what="blocks"),
        cost_model=reader.boolean("cost_model", default=True),
        health_gate=reader.boolean("health_gate", default=True),
        health_check=reader.seconds("health_check_ms", default_ms=10_000),
        tenant=reader.text("tenant", default="default"),
        credentials=Credentials(reader.text("access_id", ACCESS_ID), reader.secret("access_key", ACCESS_KEY)),
        model_id=reader.text("model_id"),
        weights_version=reader.text("weights_version"),
        namespace=_namespace(reader),
        chunk_tokens=reader.count("chunk_tokens", what="tokens"),
        store_tp_size=_store_tp_size(reader),
        kvcache_type=reader.choice("kvcache_type", ("MHA", "MLA"), ""),
        on_error=reader.choice("on_error", ("refuse", "serve_without"), "refuse"),
        explain=reader.boolean("explain", default=False),
        lookup_timeout=reader.seconds("lookup_timeout_ms", default_ms=1000),
        handoff_timeout=reader.seconds("handoff_timeout_ms", default_ms=2000),
        tier_timeout=reader.seconds("tier_timeout_ms", default_ms=800),
        call_timeout=reader.seconds("call_timeout_ms", "EMS_CALL_TIMEOUT_MS", "EMS_TIMEOUT", default_ms=2000),
    )
    said = ignored_keys(extra, reader.known, WITHOUT_MEANING, "this connector")
    if settings.backend not in ("", MOONCAKE):
        said.append(f"backend is {settings.backend!r}, which EMS does not use: the node of this host keeps the pages")
    return settings, said


def _write_rcache(reader: SettingReader) -> ClusterWrite:
    name, value = reader.find("write_rcache", "EMS_ENABLE_WRITE_RCACHE")
    words: dict[str, ClusterWrite] = {**dict.fromkeys(TRUE, "on_save"), **dict.fromkeys(FALSE, "never")}
    words |= {word: word for word in get_args(ClusterWrite)}
    text = "" if value is None else str(value).strip().lower()
    if text not in words:
        raise ConfigError(f"{name} is {value!r}, expected true, false or {', '.join(get_args(ClusterWrite)[1:])}")
    return words[text]


def _directions(reader: SettingReader, kv_role: str) -> tuple[bool, bool]:
    """Whether the engine saves and whether it loads.  Only a consumer can change that."""
    consumer_loads = reader.boolean("consumer_is_to_load", default=True)
    consumer_saves = reader.boolean("consumer_is_to_put", default=False)
    if kv_role != "kv_consumer":
        return True, True
    if not consumer_loads and not consumer_saves:
        raise ConfigError(
            "consumer_is_to_load is false for a kv_consumer that does not save either, so it would do nothing; "
            "leave consumer_is_to_load out, set consumer_is_to_put to true, or remove the connector"
        )
    return consumer_saves, consumer_loads


def _namespace(reader: SettingReader) -> str:
    """``namespace``, else ``MODEL_ID`` if it has the form ``store@_@namespace`` of context caching.

    Other programs use ``MODEL_ID`` for other things.
    """
    name, value = reader.find("namespace", "MODEL_ID")
    if name == "MODEL_ID" and "@_@" not in value:
        return ""
    return reader.text("namespace", "MODEL_ID")


def _store_tp_size(reader: SettingReader) -> int:
    size = reader.count("store_tp_size", what="parts")
    sides = {}
    for key in ("prefill_tp_size", "decode_tp_size"):
        sides[key] = reader.count(key, what="ranks", least=1, default=0)
        if size and sides[key] and size % sides[key]:
            raise ConfigError(f"store_tp_size is {size}, expected a multiple of {key}, which is {sides[key]}")
    prefill, decode = sides.values()
    if prefill and decode and max(prefill, decode) % min(prefill, decode):
        raise ConfigError(
            f"prefill_tp_size is {prefill} and decode_tp_size is {decode}, expected one to be a multiple of the other"
        )
    return size


def check_kvcache_type(declared: str, *, mla: bool) -> None:
    """Refuse a declared kind of KV cache that the model does not have; ``mla`` says whether it keeps latents.

    Raises ConfigError: the declaration is wrong.
    """
    actual = "MLA" if mla else "MHA"
    if declared and declared != actual:
        raise ConfigError(
            f"kvcache_type is {declared!r}, but the model's attention is {actual}"
            f"{'' if mla else ' (grouped queries count as MHA)'}; leave kvcache_type out or set it to {actual!r}"
        )


def ignored_keys(
    extra: Mapping[str, Any], known: set[str], without_meaning: frozenset[str], connector: str
) -> list[str]:
    """A sentence for each key that nobody knows, and one for all that mean nothing to ``connector``."""
    said = []
    for key in extra:
        if key not in known and key not in without_meaning:
            near = difflib.get_close_matches(key, known | without_meaning, n=1)
            hint = f", did you mean {near[0]!r}" if near else ""
            said.append(f"key {key!r} in kv_connector_extra_config means nothing to this connector{hint}")
    names = ", ".join(key for key in extra if key in without_meaning)
    if names:
        said.append(f"accepted, but without a meaning for {connector}, in kv_connector_extra_config: {names}")
    return said
