"""Whether a model's folder is whole: what its own files say must be there is there, as long as it must be.

Weights are not read.  A file of safetensors says in its head how long it is, which finds every download that was cut.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ems.doctor.facts import Model

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
    "tekken.json",
)
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf")
_LONGEST_HEAD = 256 << 20


def look(folder: Path) -> Model:
    if not folder.is_dir():
        return Model(str(folder), ("the folder is not there",))
    problems = []
    config = _read(folder / "config.json")
    if config is None:
        problems.append("config.json is missing or no JSON")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        problems.append("it has no tokenizer")
    return Model(str(folder), (*problems, *_weights(folder)))


def _weights(folder: Path) -> list[str]:
    index = _read(folder / _INDEX) if (folder / _INDEX).exists() else {}
    if index is None or not isinstance(index.get("weight_map", {}), dict):
        return [f"{_INDEX} is no index"]
    named = {str(name) for name in index.get("weight_map", {}).values()}
    files = sorted(named | {path.name for path in folder.glob("*.safetensors")})
    if not files and not any(path for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)):
        return ["it has no weights"]
    return [f"{name} {problem}" for name in files if (problem := _problem(folder / name))]


def _problem(path: Path) -> str:
    """What is wrong with a file of safetensors; empty when it is as long as it says."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size, _LONGEST_HEAD):
                return "is cut or no file of safetensors"
            head = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in head.items() if name != "__metadata__"]
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "cannot be read as safetensors"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"has {size} bytes, expected {expected}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
