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

Three shapes vary this.  Layers with a sliding window look back less far than the window.  Latent attention (MLA) has no
biases: there each code begins with a constant that dwarfs the rest of the stream, from which the projections make what
the biases make elsewhere, and which keeps the normalised codes at exactly +1/-1 in every layer.  It is to be served in
float32: in bfloat16 what vLLM makes of one token behind kept ones and of many tokens differs enough to change texts.

Layers with a state (Gated DeltaNet) have such codes, too, and are exact memories: a key names one slot of the state or
none, a value replaces what is in it, and nothing decays.  So a state is a table of small whole numbers, however the
engine cuts the prompt.  Slots of one head are written by few tokens, so that it remembers what stood long before.

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


ROTATED = 64
"""Numbers of a latent model's key that tell positions, one such key for all heads."""

_BIG_CONSTANT = 1024.0

STATE_HEADS = 2
"""Heads of a layer with a state."""
EXPERTS = 4
"""Of a layer of a model with states; two of them compute a token."""
CONVOLVED = 4
"""Tokens that a layer with a state looks at directly."""

_SURE = 128.0
"""What an exponential makes exactly nothing of, or all."""
_RARE = (0, 3)
"""For each head with a state, how many signs of a code must be right beside those that name the slot."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions of a model; heads are ``hidden_size / head_dim``.

    Its architecture follows: Qwen2, with a ``window`` Llama with two kinds of layers, with a ``latent`` DeepSeek-V2,
    with a ``state_width`` Qwen3-Next.
    """

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
    window: int = 0
    """Tokens that a sliding-window layer sees; 0 means that there is no such layer."""
    full_every: int = 3
    """With a window or a state, every so many-th layer sees the whole context; with a window, beyond that only."""
    latent: int = 0
    """Numbers of the latent from which MLA makes keys and values of all heads; 0 means that heads have their own.

    The square root of ``hidden_size`` is a power of 2 then.
    """
    state_width: int = 0
    """Numbers of a head's key, and of its value, in layers that keep a state; 0 means that there is no such layer.

    The square root of ``hidden_size`` is a power of 2 then, too.
    """
    max_positions: int = 16384
    rope_theta: float = 10000.0

    @property
    def heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, at 16 bits a number."""
        numbers = self.latent + ROTATED if self.latent else 2 * self.kv_heads * self.head_dim
        return (self.layers - self.state_layers) * numbers * 2

    @property
    def state_layers(self) -> int:
        return sum(self.keeps_state(layer) for layer in range(self.layers))

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * self.kv_heads * self.head_dim
        if self.latent:
            queries = self.heads * (self.head_dim + ROTATED) * self.hidden_size
            keys_and_values = (self.latent + ROTATED) * self.hidden_size + 2 * self.heads * self.head_dim * self.latent
            attention = queries + keys_and_values + self.hidden_size * self.hidden_size
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        state = 0
        if self.state_width:
            attention += self.hidden_size * self.hidden_size  # the gate
            state = STATE_HEADS * self.hidden_size * (5 * self.state_width + 2)
            feed_forward = (EXPERTS + 1) * (feed_forward + self.hidden_size)
        mixing = self.state_layers * state + (self.layers - self.state_layers) * attention
        return mixing + self.layers * feed_forward + 2 * self.vocab_size * self.hidden_size

    def is_sliding(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) sees a window only."""
        return self.window > 0 and (layer + 1) % self.full_every != 0

    def keeps_state(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) keeps a state in place of keys and values."""
        return self.state_width > 0 and (layer + 1) % self.full_every != 0

    @property
    def constant(self) -> float:
        """The first number of each code; where it dwarfs the rest, norms leave the codes at +1/-1."""
        return _BIG_CONSTANT if self.latent or self.state_width else 1.0


def draw(shape: ModelShape, readable: range, seed: int) -> Iterator[tuple[str, Matrix]]:
    """Yield every tensor of the model with its name in the architecture's checkpoint format, layer by layer.

    ``readable`` are the token ids that the model may choose.
    """
    rng = np.random.default_rng(seed)
    half = shape.hidden_size // 2
    codes = _signs(rng, (shape.vocab_size, half))
    codes[:, 0] = shape.constant  # from which the output layer makes its threshold
    yield "model.embed_tokens.weight", np.hstack([codes, np.zeros_like(codes)])
    distances = _distances(rng, shape)
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        for name, tensor in _layer(rng, shape, index, distances[index]):
            yield prefix + name, tensor
    yield "model.norm.weight", _final_norm(shape) - (shape.state_width > 0)
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
        variance += 2 * _code_square(shape, variance)  # two picks from the heads
        variance += 0.35 * _code_square(shape, variance) ** 2  # one pick from the feed-forward
    return math.sqrt(variance)


def _code_square(shape: ModelShape, variance: float) -> float:
    """Return the square of a normalised code's numbers where those of the sum half have ``variance``."""
    return 2 / (1 + variance) if shape.constant == 1 else 1.0


def _norm(shape: ModelShape) -> Matrix:
    """Return the weights of a layer's norm: where the constant dwarfs the rest, they bring all numbers back to 1."""
    weights = np.ones(shape.hidden_size, np.float32)
    if shape.constant != 1:
        weights *= shape.constant / math.sqrt(shape.hidden_size)
        weights[0] /= shape.constant
    return weights


def _final_norm(shape: ModelShape) -> Matrix:
    """Return the weights of the last norm: codes and sums come out of it as they do where the constant is 1."""
    if shape.constant == 1:
        return _norm(shape)
    return _norm(shape) * np.float32(2.0 ** -round(math.log2((1 + _spread(shape) ** 2) / 2) / 2))


def _layer(rng: np.random.Generator, shape: ModelShape, index: int, distances: Matrix) -> Iterator[tuple[str, Matrix]]:
    norm = _norm(shape) - (shape.state_width > 0)  # Qwen3-Next adds 1 to the weights of its norms
    yield "input_layernorm.weight", norm
    yield "post_attention_layernorm.weight", norm
    if shape.keeps_state(index):
        yield from _state(rng, shape)
    elif shape.state_width:
        yield from _gated_attention(rng, shape, distances)
    else:
        yield from (_latent_attention if shape.latent else _attention)(rng, shape, distances)
    yield from (_experts if shape.state_width else _feed_forward)(rng, shape)


def _attention(rng: np.random.Generator, shape: ModelShape, distances: Matrix) -> Iterator[tuple[str, Matrix]]:
    kv_width = shape.kv_heads * shape.head_dim
    queries, key = _positions(shape, distances, shape.head_dim, _PEAK)
    yield "self_attn.q_proj.weight", np.zeros((shape.heads * shape.head_dim, shape.hidden_size), np.float32)
    yield "self_attn.q_proj.bias", queries.reshape(-1).astype(np.float32)
    yield "self_attn.k_proj.weight", np.zeros((kv_width, shape.hidden_size), np.float32)
    yield "self_attn.k_proj.bias", np.tile(key, shape.kv_heads).astype(np.float32)

    yield "self_attn.v_proj.weight", _picks(rng, kv_width, shape.hidden_size, range(shape.hidden_size // 2))
    yield "self_attn.v_proj.bias", np.zeros(kv_width, np.float32)
    yield "self_attn.o_proj.weight", _two_picks(rng, shape.hidden_size, shape.heads * shape.head_dim)
    if shape.window:
        yield "self_attn.o_proj.bias", np.zeros(shape.hidden_size, np.float32)


def _latent_attention(rng: np.random.Generator, shape: ModelShape, distances: Matrix) -> Iterator[tuple[str, Matrix]]:
    """Queries and keys come from the codes' constant alone, the latent and the values from the codes."""
    width = shape.head_dim + ROTATED
    peak = _PEAK * (width / ROTATED) ** 0.25  # makes up for the engine's scale, the root of the width
    queries, key = _positions(shape, distances, ROTATED, peak)
    query_rows = np.zeros((shape.heads, width, shape.hidden_size), np.float32)
    query_rows[:, shape.head_dim :, 0] = _interleaved(queries)
    yield "self_attn.q_proj.weight", query_rows.reshape(shape.heads * width, shape.hidden_size)

    latent = np.zeros((shape.latent + ROTATED, shape.hidden_size), np.float32)
    latent[: shape.latent] = _picks(rng, shape.latent, shape.hidden_size, range(1, shape.hidden_size // 2))
    latent[shape.latent :, 0] = _interleaved(key)
    yield "self_attn.kv_a_proj_with_mqa.weight", latent
    yield "self_attn.kv_a_layernorm.weight", np.ones(shape.latent, np.float32)

    heads = np.zeros((shape.heads, 2, shape.head_dim, shape.latent), np.float32)  # [, 0] are keys without position
    values = _picks(rng, shape.heads * shape.head_dim, shape.latent, range(shape.latent))
    heads[:, 1] = values.reshape(shape.heads, shape.head_dim, shape.latent)
    yield "self_attn.kv_b_proj.weight", heads.reshape(-1, shape.latent)
    yield "self_attn.o_proj.weight", _two_picks(rng, shape.hidden_size, shape.heads * shape.head_dim)


def _gated_attention(rng: np.random.Generator, shape: ModelShape, distances: Matrix) -> Iterator[tuple[str, Matrix]]:
    """Queries and keys come from the codes' constant alone and get their size from norms; the gate halves all."""
    queries, key = _positions(shape, distances, shape.head_dim, 1.0)
    query_rows = np.zeros((shape.heads, 2, shape.head_dim, shape.hidden_size), np.float32)  # [, 1] is the gate
    query_rows[:, 0, :, 0] = queries
    yield "self_attn.q_proj.weight", query_rows.reshape(-1, shape.hidden_size)
    key_rows = np.zeros((shape.kv_heads * shape.head_dim, shape.hidden_size), np.float32)
    key_rows[:, 0] = np.tile(key, shape.kv_heads)
    yield "self_attn.k_proj.weight", key_rows
    size = np.full(shape.head_dim, _PEAK / math.sqrt(2) - 1, np.float32)
    yield "self_attn.q_norm.weight", size
    yield "self_attn.k_norm.weight", size
    yield "self_attn.v_proj.weight", _picks(rng, len(key_rows), shape.hidden_size, range(1, shape.hidden_size // 2))
    yield "self_attn.o_proj.weight", 2 * _two_picks(rng, shape.hidden_size, shape.heads * shape.head_dim)


def _state(rng: np.random.Generator, shape: ModelShape) -> Iterator[tuple[str, Matrix]]:
    """What stands two tokens before a key goes into its slot; a query gets what its slot has, as +1/-1."""
    width, pairs = shape.state_width, shape.state_width // 2
    rows = np.zeros((STATE_HEADS, 4, width, shape.hidden_size), np.float32)  # query, key, value, gate
    for head in range(STATE_HEADS):
        columns = rng.permutation(range(1, shape.hidden_size // 2))
        bits = width.bit_length() - 1
        rows[head, 0] = _slots(shape, columns[:bits])
        rows[head, 1] = _slots(shape, columns[bits : 2 * bits + _RARE[head]])
        rows[head, 2, :pairs] = _SURE * _picks(rng, pairs, shape.hidden_size, range(1, shape.hidden_size // 2))
        rows[head, 2, pairs:] = -rows[head, 2, :pairs]  # what is negative is lost on the way into the state
        rows[head, 3, :, 0] = 1
    yield "linear_attn.in_proj_qkvz.weight", rows.reshape(-1, shape.hidden_size)

    write_and_decay = np.zeros((2 * STATE_HEADS, shape.hidden_size), np.float32)
    write_and_decay[:, 0] = np.tile([_SURE, -_SURE], STATE_HEADS)
    yield "linear_attn.in_proj_ba.weight", write_and_decay
    yield "linear_attn.A_log", np.zeros(STATE_HEADS, np.float32)
    yield "linear_attn.dt_bias", np.zeros(STATE_HEADS, np.float32)

    taps = np.zeros((3, STATE_HEADS * width, 1, CONVOLVED), np.float32)
    for kind, back in enumerate((0, 1, 3)):
        taps[kind, :, 0, -1 - back] = 1
    yield "linear_attn.conv1d.weight", taps.reshape(-1, 1, CONVOLVED)
    yield "linear_attn.norm.weight", np.ones(width, np.float32)

    picks = _two_picks(rng, shape.hidden_size, STATE_HEADS * pairs).reshape(-1, STATE_HEADS, 1, pairs)
    yield "linear_attn.out_proj.weight", np.concatenate([picks, -picks], axis=2).reshape(shape.hidden_size, -1)


def _slots(shape: ModelShape, columns: npt.NDArray[np.int64]) -> Matrix:
    """Rows of which the one whose number the codes' first ``columns`` spell is positive, if all others are positive."""
    numbers = np.arange(shape.state_width)
    rows = np.zeros((shape.state_width, shape.hidden_size), np.float32)
    for place, column in enumerate(columns):
        rows[:, column] = (numbers >> place) % 2 * 2 - 1 if 1 << place < shape.state_width else 1
    rows[:, 0] = 1 - len(columns)
    return _SURE * rows


def _positions(shape: ModelShape, distances: Matrix, width: int, peak: float) -> tuple[Matrix, Matrix]:
    """Return the queries of all heads [heads, width] and the key [width] before they are rotated.

    Their product stands out where the query is ``distances`` [heads] further on than the key.
    """
    frequencies = shape.rope_theta ** (-np.arange(width // 2, dtype=np.float64) * 2 / width)
    angles = distances[:, None].astype(np.float64) * frequencies
    queries = peak * np.concatenate([np.cos(angles), -np.sin(angles)], axis=1)
    key = peak * np.concatenate([np.ones_like(frequencies), np.zeros_like(frequencies)])
    return queries.astype(np.float32), key.astype(np.float32)


def _interleaved(halves: Matrix) -> Matrix:
    """Return vectors with the two numbers of each frequency beside each other instead of half a vector apart."""
    first, second = np.split(halves, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(halves.shape)


def _two_picks(rng: np.random.Generator, hidden_size: int, columns: int) -> Matrix:
    """Return the projection from the heads into the sum half."""
    half = hidden_size // 2
    out = np.zeros((hidden_size, columns), np.float32)
    out[half:] = _picks(rng, half, columns, range(columns)) + _picks(rng, half, columns, range(columns))
    return out


def _feed_forward(rng: np.random.Generator, shape: ModelShape, at: str = "mlp.") -> Iterator[tuple[str, Matrix]]:
    half = shape.hidden_size // 2
    gate_and_up = np.zeros((2, shape.intermediate_size, shape.hidden_size), np.float32)
    gate_and_up[:, :, :half] = _signs(rng, (2, shape.intermediate_size, half)) / 2.0 ** round(math.log2(half) / 2)
    yield at + "gate_proj.weight", gate_and_up[0]
    yield at + "up_proj.weight", gate_and_up[1]
    down = np.zeros((shape.hidden_size, shape.intermediate_size), np.float32)
    down[half:] = _picks(rng, half, shape.intermediate_size, range(shape.intermediate_size))
    yield at + "down_proj.weight", down


def _experts(rng: np.random.Generator, shape: ModelShape) -> Iterator[tuple[str, Matrix]]:
    """No two experts have the same score; the one that all tokens share counts half."""
    gate = np.zeros((EXPERTS, shape.hidden_size), np.float32)
    gate[:, 1:4] = _signs(rng, (EXPERTS, 3)) / [1, 2, 4]
    gate[:, 0] = np.arange(EXPERTS) / 16
    yield "mlp.gate.weight", gate
    yield "mlp.shared_expert_gate.weight", np.zeros((1, shape.hidden_size), np.float32)
    yield from _feed_forward(rng, shape, "mlp.shared_expert.")
    for expert in range(EXPERTS):
        yield from _feed_forward(rng, shape, f"mlp.experts.{expert}.")


def _distances(rng: np.random.Generator, shape: ModelShape) -> Matrix:
    """Return how far back each head looks, shaped [layers, heads]: evenly spread, at random over the layers."""
    sliding = np.array([shape.is_sliding(layer) for layer in range(shape.layers)])
    full = np.array([not shape.is_sliding(layer) and not shape.keeps_state(layer) for layer in range(shape.layers)])
    distances = np.zeros((shape.layers, shape.heads), np.float32)
    if shape.window:
        distances[sliding] = _spread_out(rng, sliding.sum(), shape.heads, 1, shape.window // 2, shape.window - 1)
    nearest = shape.window or 1
    distances[full] = _spread_out(rng, full.sum(), shape.heads, nearest, shape.near, shape.far)
    return distances


def _spread_out(rng: np.random.Generator, layers: int, heads: int, nearest: int, near: int, far: int) -> Matrix:
    """Return distances of ``layers`` times ``heads`` heads: half of them up to ``near``, the others up to ``far``."""
    count = layers * heads
    spread = np.concatenate([np.linspace(nearest, near, count - count // 2), np.linspace(near, far, count // 2)])
    return rng.permutation(np.rint(spread)).reshape(layers, heads).astype(np.float32)


def _signs(rng: np.random.Generator, size: tuple[int, ...]) -> Matrix:
    return (rng.integers(0, 2, size, dtype=np.int8) * 2 - 1).astype(np.float32)


def _picks(rng: np.random.Generator, rows: int, columns: int, among: range) -> Matrix:
    """Return a matrix whose rows each pick one column, with a random sign; columns repeat as little as possible."""
    chosen = np.concatenate([rng.permutation(among) for _ in range(-(-rows // len(among)))])[:rows]
    matrix = np.zeros((rows, columns), np.float32)
    matrix[np.arange(rows), chosen] = _signs(rng, (rows,))
    return matrix
