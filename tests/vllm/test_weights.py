"""What tells one model from another, with real folders of every kind; what cannot be told is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm.config.load import LoadConfig

from ems.errors import ConfigError
from ems.vllm import weights

COMMIT, LATER = "a" * 40, "b" * 40


def model_of(place: Path | str, **changes: Any) -> Any:
    facts: dict[str, Any] = {
        "model": str(place),
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "trust_remote_code": False,
        "hf_config_path": None,
        "hf_overrides": {},
        "quantization_config": None,
        "hf_config": SimpleNamespace(auto_map=changes.pop("auto_map", None)),
    }
    return SimpleNamespace(**{**facts, **changes})


def split(**sizes: int) -> Any:
    return SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **sizes})


def identity(place: Path | str, parallel: Any = None, load: dict[str, Any] | None = None, **changes: Any) -> str:
    return weights.weights_identity(model_of(place, **changes), LoadConfig(**(load or {})), parallel or split())


def configuration(place: Path | str, *, named: bool = False, **changes: Any) -> str:
    return weights.config_digest(model_of(place, **changes), named=named)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "model" / "model.safetensors", bytes(range(256)) * 1000)
    return tmp_path / "model"


def later(path: Path) -> None:
    """Another time of change, as an edit of the file makes."""
    facts = path.stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000))


# ------------------------------------------------------------------------------------------------- local folders


def test_one_changed_byte_at_either_end_is_another_model(folder: Path) -> None:
    seen = {identity(folder)}
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    for position in (0, len(content) - 1):
        content[position] ^= 1
        path.write_bytes(content)
        seen.add(identity(folder))
    assert len(seen) == 3


def test_a_change_between_the_samples_is_another_model(folder: Path) -> None:
    path = write(folder / "model.safetensors", bytes(8 << 20))
    before = identity(folder)
    content = bytearray(8 << 20)
    content[300_000] = 1
    path.write_bytes(content)
    later(path)

    assert identity(folder) != before


@pytest.mark.parametrize("when", [0, 1, 315_532_800])
def test_files_without_a_time_are_read_whole(folder: Path, when: int) -> None:
    """Images that are built reproducibly: a fine-tune that changes little has the same sizes and times."""
    path = write(folder / "model.safetensors", bytes(8 << 20))
    os.utime(path, (when, when))
    before = identity(folder)
    content = bytearray(8 << 20)
    content[300_000] = 1
    path.write_bytes(content)
    os.utime(path, (when, when))

    assert identity(folder) != before


def test_a_single_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", b"one" * 1000)
    before = identity(path)
    path.write_bytes(b"two" * 1000)
    assert identity(path) != before


@pytest.mark.parametrize(
    "names",
    [
        ["text_encoder/model.safetensors"],
        ["model.safetensors", "whisper-large-v3/model.safetensors"],
        ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
        ["consolidated.00.pt"],
        ["pytorch_model.bin"],
        ["weights.gguf"],
    ],
    ids=lambda names: names[-1],
)
def test_all_files_with_weights_count_wherever_they_lie(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / name, b"one" * 1000)
    before = identity(tmp_path)
    write(tmp_path / names[-1], b"two" * 1000)
    assert identity(tmp_path) != before


def test_files_that_downloads_leave_behind_do_not_count(folder: Path) -> None:
    before = identity(folder)
    write(folder / ".cache" / "huggingface" / "download" / "model.safetensors", b"half")
    assert identity(folder) == before


def test_a_folder_that_is_reached_by_a_link_is_the_same_model(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert identity(link) == identity(folder)


@pytest.mark.parametrize("content", [{}, {"config.json": b"{}"}, {"weights.tensors": b"serialised"}], ids=str)
def test_a_folder_without_weights_is_refused(tmp_path: Path, content: dict[str, bytes]) -> None:
    for name, raw in content.items():
        write(tmp_path / name, raw)
    with pytest.raises(ConfigError, match=r"has no file like .*; set model_id"):
        identity(tmp_path)


def test_the_load_format_counts_where_the_folder_has_weights_of_several_kinds(folder: Path) -> None:
    assert identity(folder, load={"load_format": "safetensors"}) == identity(folder)
    write(folder / "consolidated.safetensors", b"other" * 100)
    formats = ["auto", "hf", "mistral"]
    assert len({identity(folder, load={"load_format": one}) for one in formats}) == len(formats)


# ------------------------------------------------------------------------------------------ weights from elsewhere


@pytest.mark.parametrize("place", ["s3://bucket/model", "gs://bucket/model", "az://bucket/model"])
def test_streamed_weights_need_a_name(folder: Path, place: str) -> None:
    load = {"load_format": "runai_streamer"}
    with pytest.raises(ConfigError, match="set model_id"):
        identity(folder, load=load, model_weights=place)
    with pytest.raises(ConfigError, match="set model_id"):
        identity(place, load=load)


def test_weights_beside_the_configuration_are_those_that_count(folder: Path, tmp_path: Path) -> None:
    configured = tmp_path / "configured"
    write(configured / "config.json", b"{}")
    before = identity(configured, model_weights=str(folder), load={"load_format": "sharded_state"})
    write(folder / "model.safetensors", b"another" * 1000)
    assert identity(configured, model_weights=str(folder), load={"load_format": "sharded_state"}) != before


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "my_loader"])
def test_loaders_that_take_weights_from_elsewhere_need_a_name(folder: Path, load_format: str) -> None:
    with pytest.raises(ConfigError, match=f"--load-format {load_format} takes them from elsewhere.*set model_id"):
        identity(folder, load={"load_format": load_format})


def test_dummy_weights_are_not_those_of_the_folder(folder: Path) -> None:
    dummy = {"load_format": "dummy"}
    assert identity(folder, load=dummy) != identity(folder)


def test_dummy_weights_depend_on_the_split(folder: Path) -> None:
    dummy = {"load_format": "dummy"}
    splits = [split(), split(tensor_parallel_size=2), split(pipeline_parallel_size=2)]
    assert len({identity(folder, parallel, dummy) for parallel in splits}) == len(splits)


# ------------------------------------------------------------------------------------------------------------ hubs


Hub = Callable[[str, dict[str, bytes]], Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Makes the snapshots of ``org/name`` in a cache as a hub's client lays it out; ``main`` is the latest."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(commit: str, files: dict[str, bytes]) -> Path:
        repository = cache / "models--org--name"
        for name, content in files.items():
            blob = write(repository / "blobs" / content.hex()[:40], content)
            link = repository / "snapshots" / commit / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        write(repository / "refs" / "main", commit.encode())
        return repository / "snapshots" / commit

    return add


ONE = {"config.json": b'{"one": 1}', "model.safetensors": b"one" * 1000}
TWO = {"config.json": b'{"two": 2}', "model.safetensors": b"two" * 1000}


def test_a_hub_model_that_moved_on_is_another_model(hub: Hub) -> None:
    hub(COMMIT, ONE)
    before, configured = identity("org/name"), configuration("org/name")
    hub(LATER, TWO)
    assert identity("org/name") != before
    assert configuration("org/name") != configured
    assert identity("org/name", revision=COMMIT) == before


def test_the_commit_that_the_engine_looked_up_is_the_one_that_counts(hub: Hub) -> None:
    hub(COMMIT, ONE)
    revision = ResolvedRevision(COMMIT, repo_id="org/name")
    before = identity("org/name")
    hub(LATER, TWO)
    assert identity("org/name", revision=revision) == before


def test_a_hub_model_is_the_same_by_name_by_path_and_on_every_host(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = hub(COMMIT, ONE)
    before = identity("org/name")
    assert identity(place) == before

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    for part in ("blobs", "snapshots", "refs"):
        source = tmp_path / "hub" / "models--org--name" / part
        target = tmp_path / "elsewhere" / "models--org--name" / part
        target.parent.mkdir(exist_ok=True)
        source.rename(target)
    for blob in (tmp_path / "elsewhere" / "models--org--name" / "blobs").iterdir():
        later(blob)
    assert identity("org/name") == before


def test_an_edit_within_the_hub_s_cache_is_another_model(hub: Hub) -> None:
    place = hub(COMMIT, ONE)
    before = identity("org/name")
    (place / "model.safetensors").write_bytes(b"ten" * 1000)
    assert identity("org/name") != before


def test_the_download_folder_is_where_weights_of_a_hub_lie(hub: Hub, tmp_path: Path) -> None:
    hub(COMMIT, ONE)
    before = identity("org/name")
    (tmp_path / "hub").rename(tmp_path / "downloads")
    with pytest.raises(ConfigError, match="set model_id"):
        identity("org/name")
    assert identity("org/name", load={"download_dir": str(tmp_path / "downloads")}) == before


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "name"])
def test_a_hub_model_that_is_not_on_this_machine_needs_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a path nor a model in the cache of a hub"):
        identity(name)


def test_a_model_of_modelscope_is_known_by_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("modelscope.hub.snapshot_download")
    vars(module)["snapshot_download"] = lambda **_: str(folder)
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert identity("org/name") == identity(folder)


# --------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "name",
    ["config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "preprocessor_config.json",
     "model.safetensors.index.json"],
)  # fmt: skip
def test_files_that_change_what_is_computed_count(folder: Path, name: str) -> None:
    write(folder / name, b"{}")
    before = configuration(folder)
    write(folder / name, b'{"other": 1}')
    assert configuration(folder) != before


def test_files_that_do_not_change_what_is_computed_do_not_count(folder: Path) -> None:
    before = configuration(folder)
    for name in ("generation_config.json", "tokenizer.json", "README.md", "modeling.py"):
        write(folder / name, b"{}")
    assert configuration(folder) == before


def test_overrides_count(folder: Path) -> None:
    overrides: list[dict[str, Any]] = [{}, {"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}]
    assert len({configuration(folder, hf_overrides=one) for one in overrides}) == len(overrides)


def test_a_function_that_overrides_the_configuration_needs_a_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides is a function; set model_id"):
        configuration(folder, hf_overrides=lambda config: config)
    assert configuration(folder, hf_overrides=lambda config: config, named=True)


def test_a_configuration_from_elsewhere_counts(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other" / "config.json", b"{}")
    before = configuration(folder, hf_config_path=str(tmp_path / "other"))
    write(tmp_path / "other" / "config.json", b'{"other": 1}')
    assert configuration(folder, hf_config_path=str(tmp_path / "other")) != before != configuration(folder)


def test_the_model_s_own_code_counts_where_it_runs(folder: Path) -> None:
    write(folder / "modeling_own.py", b"scale = 1")
    trusted, distrusted = configuration(folder, trust_remote_code=True), configuration(folder)
    write(folder / "modeling_own.py", b"scale = 2")
    assert configuration(folder, trust_remote_code=True) != trusted
    assert configuration(folder) == distrusted


def test_code_from_another_place_counts(folder: Path, hub: Hub) -> None:
    run: dict[str, Any] = {"trust_remote_code": True, "auto_map": {"AutoModel": "org/name--modeling.Model"}}
    with pytest.raises(ConfigError, match="the code of org/name is not on this machine"):
        configuration(folder, **run)
    assert configuration(folder, named=True, **run)
    hub(COMMIT, {"modeling.py": b"scale = 1"})
    before = configuration(folder, **run)
    hub(LATER, {"modeling.py": b"scale = 2"})
    assert configuration(folder, **run) != before
    assert configuration(folder, code_revision=COMMIT, **run) == before
