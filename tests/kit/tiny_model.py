"""Makes a small model directory on the spot: no download, no torch, the same bytes for a seed.

What always holds: a directory that exists under its final name is complete, and one with other contents than asked
for is replaced; several processes may ask for the same one at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tests.kit.tiny_tokenizer import FIRST_READABLE, SPECIAL_TOKENS, TURN_END, write_tokenizer
from tests.kit.tiny_weights import CONVOLVED, EXPERTS, ROTATED, STATE_HEADS, Matrix, ModelShape, draw

Size = Literal["demo", "half-billion", "test", "mha", "mla", "hybrid", "ssm"]

_TEST = ModelShape(layers=4, hidden_size=512, intermediate_size=512, near=256, far=1024)

SHAPES: dict[Size, ModelShape] = {
    "demo": ModelShape(layers=12, hidden_size=512, intermediate_size=1536, vocab_size=43008),
    "half-billion": ModelShape(layers=24, hidden_size=896, intermediate_size=4864, vocab_size=151936),
    "test": _TEST,
    "mha": msgspec.structs.replace(_TEST, kv_heads=8),
    "mla": msgspec.structs.replace(_TEST, hidden_size=256, head_dim=32, latent=512),
    "hybrid": msgspec.structs.replace(_TEST, layers=6, window=128),
    "ssm": msgspec.structs.replace(
        _TEST, layers=8, hidden_size=256, intermediate_size=128, kv_heads=4, state_width=64, full_every=4
    ),
}
"""``demo``: 80 M parameters and 6,144 bytes of KV a token, prefill costs something.  ``half-billion``: as wide and deep
as Qwen2.5-0.5B, a small model that people serve; 12,288 bytes of KV a token.  The others start fast.

``test``: Qwen2, 8 heads on 2 of KV.  ``mha``: the same with 8 of KV.  ``mla``: DeepSeek-V2, with the only sizes of its
latent and its positions that vLLM's reference kernel for CPUs takes, which wants blocks of 16 tokens too.  ``hybrid``:
Llama with windows of 128 tokens in four of six layers, of which vLLM makes three groups of KV cache.  ``ssm``:
Qwen3-Next with states in six of eight layers, of which vLLM makes four groups; its keys and values are as wide as
vLLM's kernel for CPUs takes them, and a state has no more bytes than 64 tokens in the other layers.
"""

TOKENS = 1024
"""Tokens that the tokenizer names; the ids above are legal in prompts but stand for nothing."""

_FORMAT = 1
"""Goes up when the same shape and seed make other bytes than before."""


def make_model(directory: Path, size: Size | ModelShape = "demo", *, seed: int = 0) -> Path:
    """Make the model in ``directory`` unless it is there already, and return ``directory``."""
    shape = SHAPES[size] if isinstance(size, str) else size
    recipe = msgspec.json.encode({"format": _FORMAT, "seed": seed, "shape": shape})
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent):
        if _recipe(directory) != recipe:
            _replace(directory, shape, seed, recipe)
    return directory


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make models in ``folder``; the lock ends with its holder and leaves no file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _recipe(directory: Path) -> bytes | None:
    try:
        return (directory / "recipe.json").read_bytes()
    except OSError:
        return None


def _replace(directory: Path, shape: ModelShape, seed: int, recipe: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        _write(made, shape, seed)
        (made / "recipe.json").write_bytes(recipe)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        made.rename(directory)


def _write(directory: Path, shape: ModelShape, seed: int) -> None:
    end = SPECIAL_TOKENS.index(TURN_END) + 256
    config = {**_architecture(shape), **_dimensions(shape), "bos_token_id": None, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": end}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, TOKENS, seed)
    write_safetensors(directory / "model.safetensors", draw(shape, range(FIRST_READABLE, TOKENS), seed))


def _dimensions(shape: ModelShape) -> dict[str, object]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }


def _architecture(shape: ModelShape) -> dict[str, object]:
    if shape.latent:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": shape.heads,
            "kv_lora_rank": shape.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": shape.head_dim,
            "qk_rope_head_dim": ROTATED,
            "v_head_dim": shape.head_dim,
            "first_k_dense_replace": shape.layers,  # no layer has experts
            # Changes nothing, but vLLM 0.32 computes plain rotation wrongly for keys in a row of more than one tensor.
            "rope_scaling": {
                "type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": shape.max_positions,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        }
    heads = {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    if shape.state_width:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "full_attention_interval": shape.full_every,
            "partial_rotary_factor": 1.0,
            "linear_conv_kernel_dim": CONVOLVED,
            "linear_key_head_dim": shape.state_width,
            "linear_value_head_dim": shape.state_width,
            "linear_num_key_heads": STATE_HEADS,
            "linear_num_value_heads": STATE_HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": shape.intermediate_size,
            "shared_expert_intermediate_size": shape.intermediate_size,
            **heads,
        }
    if not shape.window:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, **heads}
    kinds = ("full_attention", "sliding_attention")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "sliding_window": shape.window,
        "layer_types": [kinds[shape.is_sliding(layer)] for layer in range(shape.layers)],
        **heads,
    }


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Matrix]]) -> None:
    """Write tensors as bfloat16, rounded to nearest even; the format is a length, a JSON header and the raw bytes."""
    bodies = {name: (tensor.shape, _bfloat16(tensor)) for name, tensor in tensors}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, body) in bodies.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + body.nbytes)}
        offset += body.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, body in bodies.values():
            file.write(body.data)


def _bfloat16(tensor: Matrix) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
