"""An engine whose cache is reset and whose weights change, as a program of its own: it prints what it saw as JSON.

``python -m tests.e2e.reset_engine MODE MODEL OTHER SOCKET``.  The mode ``in process`` runs the engine in this process,
``apart`` in one of its own, ``pair`` two of them, ``bare`` computes what they should with the weights of ``OTHER``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.e2e.engines import OPTIONS, random_prompt
from tests.kit import async_scheduling  # noqa: F401 - steps overlap in all engines of this program
from tests.kit.engine import ENVIRONMENT

BLOCK = 32
PROMPTS = [random_prompt(900 + number, 300 + 50 * number) for number in range(4)]
ROUNDS = 20


def make_engine(model: str, socket: str | None, **more: Any) -> Any:
    from vllm import LLM

    extra = {"socket": socket, "autostart": False}
    transfer = {"kv_connector": "EmsStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return LLM(
        model=model,
        dtype=OPTIONS.dtype,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=transfer if socket else None,
        **more,
    )


def answers(engine: Any) -> list[list[int]]:
    """Token ids of the greedy answers."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def hits(engine: Any) -> int:
    """Tokens that the pool gave until now."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


def reset(engine: Any) -> bool:
    return bool(engine.reset_prefix_cache(reset_connector=True))


def change(engine: Any, weights: str) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})


def alone(model: str, other: str, socket: str, *, in_process: bool) -> dict[str, Any]:
    engine = make_engine(model, socket)
    seen: dict[str, Any] = {"resets": []}
    for _ in range(ROUNDS):
        answers(engine)
        seen["resets"].append(reset(engine))
    if in_process:
        answers(engine)
        # Raises where blocks are still held.
        engine.llm_engine.engine_core.engine_core.pause_scheduler(mode="abort")
        engine.llm_engine.engine_core.engine_core.resume_scheduler()
    answers(engine)
    seen["resets"].append(reset(engine))
    change(engine, other)
    seen["answers"] = answers(engine)
    return seen


def pair(model: str, other: str, socket: str) -> dict[str, Any]:
    """One stores what its new weights compute, the other finds it once it was told that it has the same."""
    engines = [make_engine(model, socket) for _ in range(2)]
    seen: dict[str, Any] = {"resets": [], "answers": []}
    for engine in engines:
        answers(engine)
        seen["resets"].append(reset(engine))
        change(engine, other)
    one, two = engines
    before = hits(two)
    seen["answers"].append(answers(one))
    seen["answers"].append(answers(two))
    seen["hits before a version was declared"] = hits(two) - before
    for engine in engines:
        seen["resets"].append(reset(engine))
        engine.llm_engine.set_weight_version("run/1")
    seen["answers"].append(answers(one))
    # Steps go on until all is saved, and what is pending then is waited for.
    before = hits(two)
    for _ in range(ROUNDS):
        two.reset_prefix_cache()
        seen["answers"].append(answers(two))
        if hits(two) > before:
            break
    seen["hits afterwards"] = hits(two) - before
    return seen


def main(mode: str, model: str, other: str, socket: str) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(mode != "in process"))
    if mode == "bare":
        seen: dict[str, Any] = {"answers": answers(make_engine(other, None))}
    elif mode == "pair":
        seen = pair(model, other, socket)
    else:
        seen = alone(model, other, socket, in_process=mode == "in process")
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
