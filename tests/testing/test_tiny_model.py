from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ems.testing.tiny_model import SHAPES, TOKENS, make_model, write_safetensors
from ems.testing.tiny_tokenizer import FIRST_READABLE, SPECIAL_TOKENS, write_tokenizer
from ems.testing.tiny_weights import ModelShape, draw

SMALL = ModelShape(layers=1, hidden_size=64, intermediate_size=32, kv_heads=1, near=4, far=8)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read the format from its definition: length, header, bytes."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    body = raw[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    one = contents(make_model(tmp_path / "one", SMALL, seed=3))

    assert contents(make_model(tmp_path / "two", SMALL, seed=3)) == one
    assert contents(make_model(tmp_path / "other", SMALL, seed=4))["model.safetensors"] != one["model.safetensors"]


def test_a_model_that_is_there_is_kept_and_another_is_replaced(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", SMALL)
    made = (model / "model.safetensors").stat().st_mtime_ns

    make_model(model, SMALL)
    assert (model / "model.safetensors").stat().st_mtime_ns == made
    make_model(model, SMALL, seed=1)
    assert (model / "model.safetensors").stat().st_mtime_ns != made
    assert list(tmp_path.iterdir()) == [model], "nothing is left beside it"


def test_several_ask_for_the_same_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: make_model(tmp_path / "model", SMALL), range(8)))

    assert set(models) == {tmp_path / "model"}
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_demo_shape_is_what_the_demo_says() -> None:
    shape = SHAPES["demo"]

    assert shape.kv_bytes_per_token == 6144
    assert 128 * shape.kv_bytes_per_token == 768 << 10
    assert 78e6 < shape.parameters < 85e6


def test_parameters_are_those_of_the_tensors() -> None:
    tensors = dict(draw(SHAPES["test"], range(FIRST_READABLE, TOKENS), 0))
    matrices = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 2)

    assert matrices == SHAPES["test"].parameters


def test_checkpoint(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", SMALL)
    tensors = read_safetensors(model / "model.safetensors")

    assert {dtype for dtype, _, _ in tensors.values()} == {"BF16"}
    assert all(len(raw) == 2 * np.prod(shape) for _, shape, raw in tensors.values())
    assert tensors["model.layers.0.self_attn.k_proj.weight"][1] == [64, 64]
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]


@pytest.mark.parametrize(
    ("number", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (0.0, 0), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-7, 0x3F81)],
)
def test_numbers_round_to_the_nearest_even(tmp_path: Path, number: float, bits: int) -> None:
    write_safetensors(tmp_path / "file", [("x", np.array([number], np.float32))])

    assert read_safetensors(tmp_path / "file")["x"] == ("BF16", [1], bits.to_bytes(2, "little"))


def test_heads_look_back_evenly() -> None:
    """Each quarter of the near half is looked at by a quarter of the near heads; none looks at its own position."""
    from ems.testing.tiny_weights import _distances

    shape = SHAPES["demo"]
    distances = _distances(np.random.default_rng(0), shape).reshape(-1)

    assert len(distances) == shape.layers * shape.heads == 96
    assert distances.min() == 1
    assert distances.max() == shape.far
    quarters, _ = np.histogram(distances[distances < shape.near], bins=4, range=(0, shape.near))
    assert quarters.min() >= 11


def test_only_readable_tokens_can_win() -> None:
    tensors = dict(draw(SMALL, range(FIRST_READABLE, TOKENS), 0))
    hidden = np.random.default_rng(1).normal(size=(SMALL.hidden_size, 200)).astype(np.float32)
    hidden[0] = np.abs(hidden[0]) + 0.1  # the constant that each token carries
    winners = (tensors["lm_head.weight"] @ hidden).argmax(axis=0)

    assert winners.min() >= FIRST_READABLE
    assert winners.max() < TOKENS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, TOKENS, 0)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("text", ["Hello, world!", "  two  spaces\n\ttab", "Wörter 你好 🙂", "bafomu lehi", ""])
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == TOKENS
    assert [tokenizer.id_to_token(256 + i) for i in range(3)] == list(SPECIAL_TOKENS)
    readable = tokenizer.decode(list(range(FIRST_READABLE, TOKENS)))
    assert readable.replace(" ", "").isalpha()
    assert readable.isascii()


def test_special_tokens_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("<|im_start|>user<|im_end|>").ids) == 2 + len(tokenizer.encode("user").ids)


def test_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a vocabulary of 300 tokens is too small, expected 399 or more"):
        write_tokenizer(tmp_path, 300, 0)
