from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.kit.tiny_model import SHAPES, TOKENS, Size, make_model, write_safetensors
from tests.kit.tiny_tokenizer import FIRST_READABLE, SPECIAL_TOKENS, write_tokenizer
from tests.kit.tiny_weights import ModelShape, draw

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


@pytest.mark.parametrize("size", ["test", "mha", "mla", "hybrid", "ssm"])
def test_parameters_are_those_of_the_tensors(size: Size) -> None:
    tensors = dict(draw(SHAPES[size], range(FIRST_READABLE, TOKENS), 0))
    matrices = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 2)

    assert matrices == SHAPES[size].parameters


@pytest.mark.parametrize(
    ("size", "architecture", "bytes_per_token"),
    [
        ("test", "Qwen2ForCausalLM", 4 * 2 * 2 * 64 * 2),
        ("mha", "Qwen2ForCausalLM", 4 * 2 * 8 * 64 * 2),
        ("mla", "DeepseekV2ForCausalLM", 4 * 576 * 2),
        ("hybrid", "LlamaForCausalLM", 6 * 2 * 2 * 64 * 2),
        ("ssm", "Qwen3NextForCausalLM", 2 * 2 * 4 * 64 * 2),
    ],
)
def test_each_layout_has_an_architecture(tmp_path: Path, size: Size, architecture: str, bytes_per_token: int) -> None:
    config = json.loads((make_model(tmp_path / "model", size) / "config.json").read_text())

    assert config["architectures"] == [architecture]
    assert SHAPES[size].kv_bytes_per_token == bytes_per_token


def test_a_hybrid_has_layers_of_both_kinds(tmp_path: Path) -> None:
    config = json.loads((make_model(tmp_path / "model", "hybrid") / "config.json").read_text())

    sliding, full = "sliding_attention", "full_attention"
    assert config["layer_types"] == [sliding, sliding, full, sliding, sliding, full]
    assert config["sliding_window"] == 128


def test_layers_with_a_window_look_into_it_and_the_others_beyond_it() -> None:
    from tests.kit.tiny_weights import _distances

    shape = SHAPES["hybrid"]
    distances = _distances(np.random.default_rng(0), shape)
    sliding = [shape.is_sliding(layer) for layer in range(shape.layers)]
    near, far = distances[sliding], distances[np.logical_not(sliding)]

    assert near.min() == 1
    assert near.max() == shape.window - 1
    assert far.min() == shape.window
    assert far.max() == shape.far


def rotated(vector: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of numbers that lie in pairs, from its definition."""
    angles = position * 10000.0 ** (-np.arange(0, len(vector), 2) / len(vector))
    pairs = (vector[::2] + 1j * vector[1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)


def test_a_latent_head_finds_the_position_it_looks_for() -> None:
    """The score of its distance stands out by so much that the softmax leaves nothing to the others."""
    shape = SHAPES["mla"]
    tensors = dict(draw(shape, range(FIRST_READABLE, TOKENS), 0))
    queries = tensors["model.layers.0.self_attn.q_proj.weight"][:, 0].reshape(shape.heads, -1)[:, shape.head_dim :]
    key = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][shape.latent :, 0]
    keys = np.array([rotated(key, position) for position in range(1500)])
    scale = (shape.head_dim + len(key)) ** -0.5

    for query in queries:
        scores = keys @ rotated(query, 1400) * scale
        best, second = np.sort(scores[:1401])[[-1, -2]]
        assert best - second > 12
        assert 0 < 1400 - int(scores.argmax()) <= shape.far


def test_latent_codes_are_exact_in_every_layer() -> None:
    """Whatever was added to the stream, the first numbers come out of a layer's norm as +1 and -1 in bfloat16."""
    shape = SHAPES["mla"]
    tensors = dict(draw(shape, range(FIRST_READABLE, TOKENS), 0))
    half = shape.hidden_size // 2
    stream = tensors["model.embed_tokens.weight"].copy()
    stream[:, half:] += np.random.default_rng(2).normal(scale=3.5, size=(len(stream), half))
    normalised = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True) + 1e-6)
    codes = (normalised * tensors["model.layers.3.input_layernorm.weight"])[:, :half]

    assert np.abs(np.abs(codes) - 1).max() < 2**-9


def test_a_state_is_a_table() -> None:
    """Each token asks for one slot and writes into one or none; of the second head's slots few are written."""
    shape = SHAPES["ssm"]
    tensors = dict(draw(shape, range(FIRST_READABLE, TOKENS), 0))
    codes = np.sign(tensors["model.embed_tokens.weight"])
    rows = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, 4, shape.state_width, -1)
    asked, written = ((np.maximum(codes @ rows[:, kind].swapaxes(1, 2), 0) / 128) for kind in (0, 1))

    assert set(np.unique(asked)) == set(np.unique(written)) == {0, 1}
    assert (asked.sum(axis=-1) == 1).all()
    assert written.sum(axis=-1).max() == 1
    assert written[0].sum() == len(codes)
    assert 0 < written[1].sum() < len(codes) / 4


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
    from tests.kit.tiny_weights import _distances

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
