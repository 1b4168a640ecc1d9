"""Engines that compute with LoRA adapters, as a program of their own: it prints what it saw as JSON.

``python -m tests.e2e.adapter_engine MODEL FOLDER SOCKET``.  Two engines share the pool at SOCKET, a third has none and
says what the answers should be.  The adapters are made in FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.reset_engine import PROMPTS, ROUNDS, make_engine
from tests.kit.engine import ENVIRONMENT
from tests.kit.tiny_model import write_safetensors

RANK = 4


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of the values in every layer: what a token says to those that look at it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    inner, outer = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    source, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = source.standard_normal((RANK, inner), np.float32)
        tensors[f"{name}.lora_B.weight"] = source.standard_normal((outer, RANK), np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors.items())
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def lora(path: Path, number: int, name: str, *, in_place: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), load_inplace=in_place)


def answers(engine: Any, adapter: Any) -> tuple[list[list[int]], int]:
    """Token ids of the greedy answers of an engine that empties its own cache before, and tokens from the pool."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    return [list(one.outputs[0].token_ids) for one in outputs], sum(one.num_cached_tokens or 0 for one in outputs)


def again(engine: Any, adapter: Any) -> tuple[list[list[int]], int]:
    """The same once the pool has given something; what was computed before may still be on its way there."""
    return next((seen for _ in range(ROUNDS) if (seen := answers(engine, adapter))[1]), ([], 0))


def main(model: str, scratch: str, socket: str) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    folder = Path(scratch)
    first, second = (make_adapter(folder / name, Path(model), seed) for seed, name in enumerate(("first", "second"), 1))
    copy = Path(shutil.copytree(first, folder / "copy"))
    bare = make_engine(model, None, enable_lora=True, max_loras=2, max_lora_rank=8)
    seen: dict[str, Any] = {
        name: answers(bare, lora(folder / name, at, name))[0] for at, name in enumerate(("first", "second"), 1)
    }
    del bare
    one, two = (make_engine(model, socket, enable_lora=True, max_loras=2, max_lora_rank=8) for _ in range(2))
    seen["stored"] = answers(one, lora(first, 1, "a"))
    seen["found again"] = again(one, lora(first, 1, "a"))
    seen["under another name"] = again(two, lora(copy, 7, "b"))
    seen["others under the same name"] = answers(two, lora(second, 8, "a"))
    make_adapter(copy, Path(model), 2)
    two.llm_engine.add_lora(lora(copy, 7, "b", in_place=True))
    seen["reloaded in place"] = again(two, lora(copy, 7, "b"))
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
