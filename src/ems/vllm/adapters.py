"""Which weights the LoRA adapters of one engine have: pages of a request with an adapter are named by these.

An adapter is identified by the content of its files, never by its name, path or number.  Users may load other weights
under all three of these, and vLLM's own prefix cache then keeps blocks of the weights before.  What always holds: pages
are named by an adapter's weights only if the workers computed them with these weights, and behind blocks that were
computed with them too; a request whose adapter breaks this is computed and not stored.

The scheduler side names the weights (:class:`Adapters`) when the engine loads them.  A worker notes which files it has
read (:func:`watch_loads`) and refuses what is named otherwise, because vLLM reads an adapter again without a word when
it had to make room for others.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from vllm import envs

from ems.errors import ConfigError
from ems.vllm.requests import Adapter
from ems.vllm.weights import plain_text, source

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""VLLM reads the first of these that is there."""

_BESIDE = ("adapter_config.json", "new_embeddings.safetensors", "new_embeddings.bin")

_WATCHED = "_ems_watched"

MOST = 65536
"""Names under which the engine's own cache may have blocks of adapters; with more of them adapters are not stored."""


# ----------------------------------------------------------------------------------------------------------- files

_Stamp = tuple[tuple[str, int, int, int], ...]
_digests: dict[Path, tuple[_Stamp, str]] = {}
_lock = threading.Lock()


def files_digest(path: str) -> str:
    """A digest of all bytes of the adapter in the folder ``path``, or of that name in a hub's cache.

    A folder is read again only when the size or a time of one of its files has changed.

    Raises ConfigError: there is no adapter whose files are on this machine.
    """
    place = Path(path).expanduser()
    # Another hub would be asked over the network.
    folder = place if place.is_dir() else None if envs.VLLM_USE_MODELSCOPE else source(path, None, None)
    files = [] if folder is None else [folder / name for name in _BESIDE if (folder / name).is_file()]
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None) if folder else None
    if folder is None or weights is None:
        raise ConfigError(f"the weights of the LoRA adapter {path} are not in files on this machine")
    files.append(weights)
    try:
        with _lock:
            return _read(folder, files)
    except OSError as error:
        raise ConfigError(f"the files of the LoRA adapter {path} cannot be read: {error.strerror}") from error


def _read(folder: Path, files: list[Path]) -> str:
    stamp, known = _stamp(files), _digests.get(folder)
    if known is not None and known[0] == stamp:
        return known[1]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    if _stamp(files) != stamp:
        raise ConfigError(f"the files of the LoRA adapter in {folder} change while they are read")
    _digests[folder] = stamp, digest.hexdigest()
    return digest.hexdigest()


def _stamp(files: list[Path]) -> _Stamp:
    facts = [(file.name, file.stat()) for file in files]
    return tuple((name, fact.st_size, fact.st_mtime_ns, fact.st_ctime_ns) for name, fact in facts)


# ------------------------------------------------------------------------------------------------ the scheduler side


_USES = (
    "lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""Settings of vLLM that change what it computes with an adapter."""


def how_used(lora_config: Any) -> str:
    return plain_text([getattr(lora_config, name, None) for name in _USES])


class Adapters:
    """The adapters of one engine; ``use`` says in which of its ways it computes with them."""

    def __init__(self, use: str) -> None:
        self._use = use
        self._loaded: dict[int, tuple[str, Adapter]] = {}
        """Where each adapter was loaded from, by its number, and what it is."""
        self._blocks: dict[tuple[str, str], str] = {}
        """With which weights the engine's own blocks of a name and path were computed; "" for several."""

    def find(self, lora: Any) -> Adapter:
        """The adapter of a request that came in.

        Raises ConfigError: its weights are not known, or the engine still has blocks that others computed.
        """
        number, path = lora.lora_int_id, lora.lora_path
        loaded = self._loaded.get(number)
        if loaded is None:
            loaded = self._loaded[number] = path, Adapter(number, files_digest(path))
        if loaded[0] != path:
            raise ConfigError(f"the LoRA adapter {lora.lora_name} was loaded from {loaded[0]}, not from {path}")
        adapter = loaded[1]
        if len(self._blocks) >= MOST:
            raise ConfigError(f"the engine has had more than {MOST} LoRA adapters since its cache was empty")
        if self._blocks.setdefault((lora.lora_name, path), adapter.digest) != adapter.digest:
            raise ConfigError(
                f"the LoRA adapter {lora.lora_name} has other weights than before in {path}, and the engine's own "
                "cache keeps what those computed; load changed weights from a new path, or reset the prefix cache"
            )
        return adapter

    def key(self, lora: Any, adapter: Adapter) -> str:
        """A name of all that changes what is computed with the adapter."""
        return f"{adapter.digest}/{self._use}/{getattr(lora, 'is_3d_lora_weight', False)}"

    def loaded(self, lora: Any) -> bool:
        """The engine has read an adapter's files.  True if running requests used other weights until now."""
        number, before = lora.lora_int_id, self._loaded.pop(lora.lora_int_id, None)
        try:
            self._loaded[number] = lora.lora_path, Adapter(number, files_digest(lora.lora_path))
        except ConfigError:
            # A request with it asks again, and is told why not.
            return before is not None
        return before is not None and before[1] != self._loaded[number][1]

    def mixed(self, lora: Any) -> None:
        """A running request continues with other weights, so several weights have computed its blocks."""
        self._blocks[lora.lora_name, lora.lora_path] = ""

    def emptied(self, live: Iterable[Any]) -> None:
        """The engine's own cache was emptied.  Requests with the adapters ``live`` go on and will fill it again."""
        names = {(lora.lora_name, lora.lora_path) for lora in live}
        self._blocks = {name: digest for name, digest in self._blocks.items() if name in names}


# --------------------------------------------------------------------------------------------------------- the worker

_managers: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""What each of vLLM's adapter managers in this process has read: digests by number, "" where that is not known."""


def watch_loads() -> bool:
    """Make vLLM's workers in this process note which adapters they read.  False if this release cannot."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    if _WATCHED in vars(WorkerLoRAManager):
        return True
    load = getattr(WorkerLoRAManager, "_load_adapter", None)
    if load is None:
        return False

    @functools.wraps(load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        before = _digest(lora_request)
        read = load(self, lora_request)
        after = _digest(lora_request)
        # A hub's adapter may not have been here before.
        _managers.setdefault(self, {})[lora_request.lora_int_id] = after if before in ("", after) else ""
        return read

    WorkerLoRAManager._load_adapter = load_adapter  # noqa: SLF001 - there is no public place
    setattr(WorkerLoRAManager, _WATCHED, True)
    return True


def _digest(lora: Any) -> str:
    try:
        return files_digest(lora.lora_path)
    except ConfigError:
        return ""


def has_read(adapter: Adapter, *, before: bool) -> bool:
    """Whether this process computes with the weights of ``adapter``; ``before`` is the answer until it has read any."""
    read = {numbers[adapter.number] for numbers in list(_managers.values()) if adapter.number in numbers}
    return read == {adapter.digest} if read else before
