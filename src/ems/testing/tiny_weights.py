"""Random weights with which a small model behaves well under test.

Weights drawn at random the usual way make a poor test model: the two best tokens are often nearly equal, so that a
rounding difference between one way of computing a prompt and another (in chunks, or with its KV loaded) changes the
text, and a comparison of texts proves nothing.  Here the draw has a structure, and these always hold:

- The residual stream has two halves.  The *code* half holds +1/-1 per token and is only read; the *sum* half is only
  written, and read by the output layer alone.  No rounding difference can travel from layer to layer.
- Every attention head looks at one earlier position at a random distance of its own: the query and key biases are
  such that rotary embedding makes one score stand out.  Values are signed permutations of the codes, so each row of
  each matrix product has few terms, or terms whose sum is exact: the result does not depend on the order of summation.
- The distances of all heads cover the context evenly, so the text depends on the whole prompt: a block of KV that is
  missing, stale or of another prompt changes the text within a few tokens.
- Tokens that are no readable text have no weight in the output layer and are never chosen greedily, so neither is the
  end of the sequence: answers have the length that was asked for.

Everything is a function of the shape and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float32]

_PEAK = 11.0
"""Size of a query's and a key's component per frequency; neighbours of the sought position score about 16 less."""

_BEST = 3.1
"""About how many standard deviations the best of some hundred random logits lies above their mean."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions of a Qwen2-architecture model; heads are ``hidden_size / head_dim``."""

    layers: int
    hidden_size: int
    intermediate_size: int
    kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 1024
    """Rows of the embedding; ids that the tokenizer does not name are legal in prompts and never chosen."""
    near: int = 1024
    """Half of the heads look at most so many tokens back."""
    far: int = 4096
    """The other half of the heads look further back, up to so many tokens."""
    max_positions: int = 16384
    rope_theta: float = 10000.0

    @property
    def heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, at 16 bits a number."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * self.kv_heads * self.head_dim
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        return self.layers * (attention + feed_forward) + 2 * self.vocab_size * self.hidden_size


def draw(shape: ModelShape, readable: range, seed: int) -> Iterator[tuple[str, Matrix]]:
    """Yield every tensor of the model with its name in Qwen2's checkpoint format, layer by layer.

    ``readable`` are the token ids that the model may choose.
    """
    rng = np.random.default_rng(seed)
    half = shape.hidden_size // 2
    codes = _signs(rng, (shape.vocab_size, half))
    codes[:, 0] = 1  # the constant from which the output layer makes its threshold
    yield "model.embed_tokens.weight", np.hstack([codes, np.zeros_like(codes)])
    distances = _distances(rng, shape)
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        for name, tensor in _layer(rng, shape, distances[index]):
            yield prefix + name, tensor
    yield "model.norm.weight", np.ones(shape.hidden_size, np.float32)
    yield "lm_head.weight", _output(rng, shape, readable)


def _output(rng: np.random.Generator, shape: ModelShape, readable: range) -> Matrix:
    """Return the output layer: logits have a standard deviation of about 4, mostly due to the prompt.

    A threshold common to all tokens brings the best logits near zero, where bfloat16 is finest: they hardly ever tie.
    """
    half = shape.hidden_size // 2
    scale = 2.0 ** -round(math.log2(math.sqrt(half) / 3))
    rows = slice(readable.start, readable.stop)
    output = np.zeros((shape.vocab_size, shape.hidden_size), np.float32)
    output[rows, :half] = _signs(rng, (len(readable), half)) * (scale / 4)
    output[rows, half:] = _signs(rng, (len(readable), half)) * scale
    threshold = round(_BEST * math.sqrt(half) * _spread(shape)) * scale
    output[:, 0] = -2 * threshold
    output[rows, 0] = -threshold
    return output


def _spread(shape: ModelShape) -> float:
    """Return about how large a number of the sum half is at the end, beside the 1 of the code half."""
    variance = 0.0
    for _ in range(shape.layers):
        square = 2 / (1 + variance)  # of a normalised code
        variance += 2 * square  # two picks from the heads
        variance += 0.35 * (2 / (1 + variance)) ** 2  # one pick from the feed-forward
    return math.sqrt(variance)


def _layer(rng: np.random.Generator, shape: ModelShape, distances: Matrix) -> Iterator[tuple[str, Matrix]]:
    half = shape.hidden_size // 2
    kv_width = shape.kv_heads * shape.head_dim
    yield "input_layernorm.weight", np.ones(shape.hidden_size, np.float32)
    yield "post_attention_layernorm.weight", np.ones(shape.hidden_size, np.float32)

    frequencies = shape.rope_theta ** (-np.arange(shape.head_dim // 2, dtype=np.float64) * 2 / shape.head_dim)
    angles = distances[:, None].astype(np.float64) * frequencies
    queries = _PEAK * np.concatenate([np.cos(angles), -np.sin(angles)], axis=1)
    key = _PEAK * np.concatenate([np.ones_like(frequencies), np.zeros_like(frequencies)])
    yield "self_attn.q_proj.weight", np.zeros((shape.heads * shape.head_dim, shape.hidden_size), np.float32)
    yield "self_attn.q_proj.bias", queries.reshape(-1).astype(np.float32)
    yield "self_attn.k_proj.weight", np.zeros((kv_width, shape.hidden_size), np.float32)
    yield "self_attn.k_proj.bias", np.tile(key, shape.kv_heads).astype(np.float32)

    yield "self_attn.v_proj.weight", _picks(rng, kv_width, shape.hidden_size, range(half))
    yield "self_attn.v_proj.bias", np.zeros(kv_width, np.float32)
    attended = shape.heads * shape.head_dim
    out = np.zeros((shape.hidden_size, attended), np.float32)
    out[half:] = _picks(rng, half, attended, range(attended)) + _picks(rng, half, attended, range(attended))
    yield "self_attn.o_proj.weight", out

    gate_and_up = np.zeros((2, shape.intermediate_size, shape.hidden_size), np.float32)
    gate_and_up[:, :, :half] = _signs(rng, (2, shape.intermediate_size, half)) / 2.0 ** round(math.log2(half) / 2)
    yield "mlp.gate_proj.weight", gate_and_up[0]
    yield "mlp.up_proj.weight", gate_and_up[1]
    down = np.zeros((shape.hidden_size, shape.intermediate_size), np.float32)
    down[half:] = _picks(rng, half, shape.intermediate_size, range(shape.intermediate_size))
    yield "mlp.down_proj.weight", down


def _distances(rng: np.random.Generator, shape: ModelShape) -> Matrix:
    """Return how far back each head looks, shaped [layers, heads]: evenly spread, at random over the layers."""
    count = shape.layers * shape.heads
    near = np.linspace(1, shape.near, count - count // 2)
    far = np.linspace(shape.near, shape.far, count // 2)
    return rng.permutation(np.rint(np.concatenate([near, far]))).reshape(shape.layers, shape.heads).astype(np.float32)


def _signs(rng: np.random.Generator, size: tuple[int, ...]) -> Matrix:
    return (rng.integers(0, 2, size, dtype=np.int8) * 2 - 1).astype(np.float32)


def _picks(rng: np.random.Generator, rows: int, columns: int, among: range) -> Matrix:
    """Return a matrix whose rows each pick one column, with a random sign; columns repeat as little as possible."""
    chosen = np.concatenate([rng.permutation(among) for _ in range(-(-rows // len(among)))])[:rows]
    matrix = np.zeros((rows, columns), np.float32)
    matrix[np.arange(rows), chosen] = _signs(rng, (rows,))
    return matrix
