"""What a user may write in ``kv_connector_extra_config`` for the pool connector, with defaults and checks.

Numbers and booleans may come as strings, as they do in many deployed files.  A wrong value is refused with a
sentence that names key, value and expectation; an unknown key is reported and ignored, because files are
shared between connectors.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ems.config import NodeConfig, default_directory, default_socket, parse_size
from ems.errors import ConfigError


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one connector."""

    saves: bool
    """Whether this engine stores what it computes (``kv_producer``, ``kv_both``)."""

    socket: Path
    """The node's socket; ``socket`` or ``EMS_SOCKET``."""

    directory: Path
    """Where a node that is started from here keeps its segments; ``directory`` or ``EMS_DIR``."""

    autostart: bool = True
    """Start a node when none runs; ``autostart`` or ``EMS_AUTOSTART``."""

    pool_size: int = 0
    """Bytes of a pool that is started from here, 0 for the node's default; ``pool_size`` or ``EMS_POOL_SIZE``."""

    load_async: bool = True
    """Load between steps while the request waits, instead of before the step that needs it."""

    layerwise: bool = False
    """Move a block layer by layer beside compute, instead of whole; ``use_layerwise``."""

    store_tp_size: int = 0
    """Parts by KV head that a block is stored in; 0 for as many as serve the usual tensor-parallel sizes."""

    save_answers: bool = True
    """Store the blocks of the answer too, so that a conversation's next turn finds them; ``save_decode_cache``."""

    tenant: str = "default"
    """Whose pages these are."""

    model_id: str = ""
    """A name for the weights; empty derives one from the weight files."""

    lookup_timeout: float = 1.0
    """Seconds after which a lookup that was not answered counts as a miss; ``lookup_timeout_ms``."""

    handoff_timeout: float = 2.0
    """Seconds that a decode waits for blocks that its prefill is still writing; ``handoff_timeout_ms``."""

    call_timeout: float = 2.0
    """Seconds that one call to the node may take; ``call_timeout_ms`` or ``EMS_CALL_TIMEOUT_MS``."""

    def node_config(self) -> NodeConfig:
        """How to start a node with these settings."""
        return NodeConfig(
            directory=self.directory, socket=self.socket, size=self.pool_size, http_port=None, autostarted=True
        )


_ACCEPTED = {
    "socket", "directory", "autostart", "pool_size", "save_decode_cache", "tenant", "model_id",
    "lookup_timeout_ms", "handoff_timeout_ms", "call_timeout_ms", "load_async", "use_layerwise", "store_tp_size",
}  # fmt: skip


def read_settings(kv_role: str, extra: Mapping[str, Any]) -> tuple[ConnectorSettings, list[str]]:
    """Settings meant by ``extra`` for an engine with ``kv_role``, and one warning sentence an unknown key.

    Raises:
        ConfigError: a value is wrong.
    """
    directory = Path(extra.get("directory") or default_directory())
    socket = (
        extra.get("socket")
        or os.environ.get("EMS_SOCKET")
        or (directory / "node.sock" if "directory" in extra else default_socket())
    )
    size = extra.get("pool_size") or os.environ.get("EMS_POOL_SIZE")
    settings = ConnectorSettings(
        saves=kv_role in ("kv_producer", "kv_both"),
        socket=Path(socket),
        directory=directory,
        autostart=_boolean("autostart", extra.get("autostart", os.environ.get("EMS_AUTOSTART", "1"))),
        pool_size=parse_size(size, name="pool_size") if size else 0,
        load_async=_boolean("load_async", extra.get("load_async", True)),
        layerwise=_boolean("use_layerwise", extra.get("use_layerwise", False)),
        store_tp_size=int(extra.get("store_tp_size", 0)),
        save_answers=_boolean("save_decode_cache", extra.get("save_decode_cache", True)),
        tenant=str(extra.get("tenant", "default")),
        model_id=str(extra.get("model_id", "")),
        lookup_timeout=_seconds("lookup_timeout_ms", extra.get("lookup_timeout_ms", 1000)),
        handoff_timeout=_seconds("handoff_timeout_ms", extra.get("handoff_timeout_ms", 2000)),
        call_timeout=_seconds(
            "call_timeout_ms", extra.get("call_timeout_ms", os.environ.get("EMS_CALL_TIMEOUT_MS", "2000"))
        ),
    )
    return settings, [_unknown(key) for key in extra if key not in _ACCEPTED]


def _boolean(key: str, value: object) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"{key} is {value!r}, expected true or false")


def _seconds(key: str, value: object) -> float:
    try:
        milliseconds = float(str(value))
    except ValueError:
        raise ConfigError(f"{key} is {value!r}, expected milliseconds as a number") from None
    if not 0 < milliseconds <= 600_000:
        raise ConfigError(f"{key} is {value!r}, expected more than 0 and at most 600000 milliseconds")
    return milliseconds / 1000


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, _ACCEPTED, n=1)
    hint = f", did you mean {near[0]!r}" if near else ""
    return f"key {key!r} in kv_connector_extra_config means nothing to this connector{hint}"
