"""What tells the weights and the configuration of one model from those of another.

What always holds: two engines have the same identity only if they read the same files, or if the user gave both the
same ``model_id``.  Where the source of the weights cannot be told, the engine is refused with a sentence that asks for
a ``model_id``; nothing is ever the digest of nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope

from ems.errors import ConfigError

_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CONFIGS = (
    "config.json",
    "params.json",
    "*.index.json",  # which of the weight files are read
    "*quant*_config.json",
    "*quantize_config.json",
    "*processor_config.json",  # what becomes of images, which are named by their pixels
)
_READ_FROM_FILES = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "npcache", "pt", "mistral", "bitsandbytes", "gguf",
    "sharded_state", "runai_streamer", "runai_streamer_sharded",
)  # fmt: skip
"""Values of ``--load-format`` with which the engine reads the model's own weight files."""

_CLOCK_WAS_SET = 631_152_000
"""1990: images that are built reproducibly set the times of all files to before that, so these tell nothing."""


def weights_identity(model: Any, load: Any, parallel: Any) -> str:
    """What tells one set of weights from another: a digest of all files with weights in the model's folder.

    Files count by name, size, time of change and :data:`_SAMPLES` spots of each, so that a model of any size costs a
    few megabytes of reading, and an edit is noticed wherever it is.  Those of a hub's cache count by the digest that
    they have as a name there instead of their time, so that two hosts agree; those without a time are read whole.

    Raises ConfigError: the source of the weights cannot be told.
    """
    load_format = str(load.load_format)
    if load_format == "dummy":
        # Each rank draws its part from the same seed, so another split makes another model.
        sizes = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
        experts = getattr(parallel, "enable_expert_parallel", False) and getattr(parallel, "data_parallel_size", 1)
        return f"dummy/{torch.__version__}/{sizes}/{experts}"
    if load_format not in _READ_FROM_FILES:
        raise _unknown(f"--load-format {load_format} takes them from elsewhere")
    digest = hashlib.sha256()
    # A streamed model has its configuration in a folder of this machine, and its weights where `model_weights` says.
    streamed = str(getattr(model, "model_weights", None) or "")
    for name in dict.fromkeys([str(model.model), streamed or str(model.model)]):
        folder = source(name, model.revision, load.download_dir)
        if folder is None:
            raise _unknown(f"{name} is neither a path nor a model in the cache of a hub on this machine")
        files = _weight_files(folder)
        if not files and streamed in ("", name):
            raise _unknown(f"{folder} has no file like {', '.join(_WEIGHTS)}")
        if len({_family(path) for path in files}) > 1:
            extra = load.model_loader_extra_config
            pattern = extra.get("pattern") if isinstance(extra, dict) else None
            digest.update(f"{load_format}\0{pattern}\0".encode())
        for path in files:
            _add_sampled(digest, path, path.relative_to(folder) if folder.is_dir() else path.name)
    return digest.hexdigest()


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        f"which weights the engine has cannot be told: {why}; set model_id in kv_connector_extra_config to a name that "
        "engines share only if their weights are the same"
    )


def config_digest(model: Any, *, named: bool) -> str:
    """A digest of the model's configuration as it was given: files, code of its own, overrides.

    Not of what the engine made of it: some models change that while they load, in the processes that load them.
    ``named`` says that the user has named the model, and with it what cannot be told from files.

    Raises ConfigError: a function overrides the configuration, or code comes from where it cannot be seen.
    """
    digest = hashlib.sha256(f"{model.hf_config_path or ''}\0".encode())
    for name in filter(None, (model.hf_config_path, str(model.model))):
        folder = source(name, model.revision, None)
        if folder is None:
            digest.update(f"{name}@{model.revision}\0".encode())
        elif folder.is_dir():
            _add_whole(digest, folder, (path for pattern in _CONFIGS for path in folder.glob(pattern)))
    if getattr(model, "trust_remote_code", False):
        for name in _code_sources(model):
            folder = source(name, model.revision if name == model.model else model.code_revision, None)
            if folder is not None and folder.is_dir():
                _add_whole(digest, folder, folder.rglob("*.py"))
            elif not named:
                raise _unknown(f"the code of {name} is not on this machine")
    overrides = model.hf_overrides
    if callable(overrides):
        if not named:
            raise _unknown("hf_overrides is a function")
        overrides = str(getattr(overrides, "__qualname__", type(overrides).__qualname__))
    digest.update(plain_text([overrides, getattr(model, "quantization_config", None)]).encode())
    return digest.hexdigest()


def _code_sources(model: Any) -> Iterator[str]:
    yield str(model.model)
    for target in (getattr(model.hf_config, "auto_map", None) or {}).values():
        for one in target if isinstance(target, (list, tuple)) else [target]:
            repository, found, _ = str(one).partition("--")
            if found:
                yield repository


def plain_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


# ----------------------------------------------------------------------------------------------------------- files


def source(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder or file of a model on this machine, also in the cache of a hub; None if it is not here."""
    place = Path(name)
    if place.exists():
        return place
    if "://" in name:
        return None
    if envs.VLLM_USE_MODELSCOPE:
        # As the engine did when it loaded the model.
        return Path(str(maybe_download_from_modelscope(name, revision)))
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(download_dir or HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    # Newer releases of vLLM have looked up the commit.
    commit = getattr(revision, "resolved", None)
    if commit is None:
        reference = repository / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / str(commit)
    return folder if folder.is_dir() else None


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return [folder]
    found = {path for pattern in _WEIGHTS for path in folder.rglob(pattern)}
    # Not what downloads and version control keep beside the model.
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _family(path: Path) -> str:
    return f"consolidated{path.suffix}" if path.name.startswith("consolidated") else path.suffix


def _add_sampled(digest: Any, path: Path, name: object) -> None:
    facts, target = path.stat(), path.resolve()
    addressed = path.is_symlink() and target.parent.name == "blobs"
    digest.update(f"{name}\0{facts.st_size}\0{target.name if addressed else facts.st_mtime_ns}\0".encode())
    with path.open("rb") as weights:
        if not addressed and facts.st_mtime < _CLOCK_WAS_SET:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
            return
        for sample in range(_SAMPLES):
            weights.seek(max(facts.st_size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            digest.update(weights.read(_SAMPLE_BYTES))


def _add_whole(digest: Any, folder: Path, files: Iterable[Path]) -> None:
    for path in sorted(set(files)):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
