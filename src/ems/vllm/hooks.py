"""The places where vLLM is made to take what people have: deployed files, models without ``head_dim``, processors.

They are installed once a process and change nothing for configurations and models that vLLM takes by itself, nor where
nobody asks for it.  Where a release of vLLM is built otherwise, a line in the log says so and vLLM stays as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from vllm.logger import init_logger

from ems.vllm.configuration.deployed_files import Installation, admit, check
from ems.vllm.configuration.setting_values import FALSE, TRUE

logger = init_logger("vllm.ems")

_INSTALLED = "_ems_installed"

SHARE_CORES = "EMS_SHARE_CORES"
"""Environment variable: 1 says that this engine has to share its cores."""


def admit_deployed_files(ours: frozenset[str]) -> None:
    """Let vLLM's KV transfer configuration pass through :func:`admit` and :func:`check` before vLLM checks it.

    It is checked in two ways, from JSON and from keyword arguments, and both go through its pydantic schema.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    if _INSTALLED in vars(KVTransferConfig):
        return
    try:
        from pydantic_core import ArgsKwargs, SchemaValidator, core_schema

        known = frozenset(field.name for field in dataclass_fields(KVTransferConfig))

        def fit(given: Any) -> Any:
            if isinstance(given, ArgsKwargs):
                return given if given.args else ArgsKwargs((), _admitted(given.kwargs or {}, ours, known))
            return _admitted(given, ours, known) if isinstance(given, dict) else given

        schema = core_schema.no_info_before_validator_function(fit, KVTransferConfig.__pydantic_core_schema__)
        KVTransferConfig.__pydantic_validator__ = SchemaValidator(schema, {"title": KVTransferConfig.__name__})
        KVTransferConfig.__pydantic_core_schema__ = schema
        setattr(KVTransferConfig, _INSTALLED, True)
    except (ImportError, AttributeError, TypeError) as error:
        logger.info("EMS cannot adapt deployed KV transfer configurations to this release of vLLM: %s", error)


def _admitted(given: dict[str, Any], ours: frozenset[str], known: frozenset[str]) -> dict[str, Any]:
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    here = Installation(ours, known, kind, lambda module: importlib.util.find_spec(module) is not None)
    admitted, said = admit(given, here)
    for sentence in said:
        logger.warning_once("EMS: %s", sentence)
    check(admitted, here)
    return admitted


def fill_head_dim() -> None:
    """Give a model's configuration the ``head_dim`` that follows from its other sizes, where it has none.

    vLLM itself derives it, but not everything beside it does: connectors of other projects ask the configuration.
    """
    from vllm.config.model import ModelConfig

    if _INSTALLED in vars(ModelConfig):
        return
    original = ModelConfig.__post_init__

    @functools.wraps(original)
    def complete(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _fill_head_dim(self)

    ModelConfig.__post_init__ = complete
    setattr(ModelConfig, _INSTALLED, True)


def _fill_head_dim(model: Any) -> None:
    """Only where every program would compute the same: not for attention with latents or of uneven sizes."""
    text = getattr(model, "hf_text_config", None)
    hidden, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if text is None or getattr(text, "head_dim", None) or getattr(text, "kv_lora_rank", None):
        return
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        return
    if model.get_head_size() == hidden // heads:
        text.head_dim = hidden // heads


def note_publisher(note: Callable[[Any], None]) -> None:
    """Call ``note`` with the publisher of KV events that this process makes next: its engine's."""
    from vllm.distributed.kv_events import EventPublisherFactory

    original = vars(EventPublisherFactory)["create"]

    def create(*args: Any, **kwargs: Any) -> Any:
        EventPublisherFactory.create = original
        publisher = EventPublisherFactory.create(*args, **kwargs)
        note(publisher)
        return publisher

    EventPublisherFactory.create = staticmethod(create)


def allow_matrix_tiles() -> None:
    """Let this process use the matrix tiles of its processor (AMX), which vLLM's attention on a CPU takes for granted.

    Linux gives them to who asks.  oneDNN asks before its first larger product; in an engine whose first step computes
    a token or two, because that is all that was sent or all the rest was loaded, attention comes before that and the
    worker ends by SIGILL.
    """
    from vllm.platforms import current_platform

    # PyTorch asks for others and has no public name for it.
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():  # noqa: SLF001
        torch.cpu._init_amx()  # noqa: SLF001


def share_cores() -> None:
    """Let vLLM's processes sleep between two looks for a message, if the environment asks for it.

    Otherwise they poll for a second after each step and only yield the processor.  On Linux 6.18 this can keep others
    from their cores for seconds, among them the engine's own threads and the pool's node.
    """
    asked = os.environ.get(SHARE_CORES, "").strip().lower()
    if asked not in TRUE:
        if asked not in FALSE:
            logger.warning_once("EMS: %s is %r, expected 1 or 0, and is ignored", SHARE_CORES, asked)
        return
    from vllm.distributed import utils

    if not hasattr(utils, "USE_SCHED_YIELD"):
        logger.info_once("EMS cannot make this release of vLLM share its cores, %s is ignored", SHARE_CORES)
        return
    utils.USE_SCHED_YIELD = False


def follow_engine() -> None:
    """Tell connectors what vLLM tells only its engine: pauses, names of weights, adapters that it has read."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from ems.vllm.compat import count_tokens_in_flight, keep_stepping

    if _INSTALLED in vars(EngineCore):
        return
    setattr(EngineCore, _INSTALLED, True)
    count_tokens_in_flight(Request, Scheduler)
    keep_stepping(Scheduler, lambda self: any(one.has_pending_push_work() for one in _ours(self.connector)))
    _tell(EngineCore, "set_weight_version", lambda connector, version: connector.weights_declared(version))
    _tell(Scheduler, "set_pause_state", lambda connector, state: connector.paused(paused=state.name != "UNPAUSED"))
    _tell(EngineCore, "add_lora", lambda connector, lora: connector.adapter_loaded(lora))


def _tell(kind: type, method: str, tell: Callable[[Any, Any], None]) -> None:
    """After ``method`` of ``kind``, an engine or its scheduler, ``tell`` our connectors what it was called with."""
    original = getattr(kind, method, None)
    if original is None:
        logger.info("EMS does not hear of %s, which this release of vLLM does not have", method)
        return

    @functools.wraps(original)
    def followed(self: Any, given: Any) -> Any:
        outcome = original(self, given)
        for connector in _ours(getattr(getattr(self, "scheduler", self), "connector", None)):
            tell(connector, given)
        return outcome

    setattr(kind, method, followed)


def _ours(connector: Any) -> list[Any]:
    children = getattr(connector, "_connectors", (connector,))
    return [child for child in children if hasattr(child, "weights_declared")]
