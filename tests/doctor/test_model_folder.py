"""A model's folder is whole, or what is missing and cut in it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ems.doctor.model_folder import look


def weights(path: Path, size: int = 64) -> None:
    head = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    )
    path.write_bytes(len(head).to_bytes(8, "little") + head.encode() + bytes(size))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in shards:
        weights(tmp_path / name)
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_whole_model_has_no_problem(model: Path) -> None:
    assert look(model).problems == ()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert look(tmp_path / "none").problems == ("the folder is not there",)


def test_an_empty_folder_lacks_everything(tmp_path: Path) -> None:
    assert len(look(tmp_path).problems) == 3


def test_a_shard_that_the_index_names_is_missed(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    assert look(model).problems == ("model-00002-of-00002.safetensors is missing",)


@pytest.mark.parametrize("left", range(0, 150, 7))
def test_a_shard_that_was_cut_anywhere_is_found(model: Path, left: int) -> None:
    path = model / "model-00001-of-00002.safetensors"
    raw = path.read_bytes()
    assert left < len(raw)
    path.write_bytes(raw[:left])
    (problem,) = look(model).problems
    assert problem.startswith(path.name)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": []}'])
def test_an_index_that_is_none_is_said(model: Path, index: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    assert look(model).problems == ("model.safetensors.index.json is no index",)


def test_weights_of_another_kind_are_not_looked_into(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    assert look(model).problems == ()
