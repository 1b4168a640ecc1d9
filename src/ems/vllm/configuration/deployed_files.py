"""Makes deployed ``--kv-transfer-config`` values fit this release of vLLM, where they name a connector of EMS.

Such files have keys that vLLM once had or that steer other hardware; vLLM refuses to start with them.  They mean
nothing here, so they are left out, with a sentence.  Configurations of other connectors pass untouched, mistakes
included: vLLM reports these itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ems.vllm.configuration.settings import read_settings
from ems.vllm.peer.transport_settings import check_sizes

_LEFT_OUT = ("kv_rank", "kv_parallel_size", "kv_ip", "lookup_rpc_port", "mooncake_rpc_port")
_MULTI = "MultiConnector"
_PEER_TO_PEER = "MooncakeConnectorV1"


class Installation(msgspec.Struct, frozen=True):
    """What keys mean depends on this: ``ours`` are the connectors that EMS serves, ``known`` the keys vLLM knows.

    ``device`` is the kind of device of this process, ``importable`` tells whether a module is installed.
    """

    ours: frozenset[str]
    known: frozenset[str]
    device: str
    importable: Callable[[str], bool]


def admit(fields: Mapping[str, Any], here: Installation) -> tuple[dict[str, Any], list[str]]:
    """``fields`` of a KV transfer configuration in the form that vLLM accepts, and a sentence on what was left out.

    Where a connector of ours is used, what cannot be loaded is recomputed unless the configuration says otherwise.
    vLLM goes by the policy of the whole, so children need none.
    """
    if _is_ours(fields, here):
        return _admit_one(fields, here)
    children = _children(fields)
    if fields.get("kv_connector") != _MULTI or not any(_is_ours(child, here) or _has_spec(child) for child in children):
        return dict(fields), []
    admitted, said = _admit_one(fields, here)
    connectors = list(children)
    for position, child in enumerate(children):
        if _is_ours(child, here):
            # vLLM gives children the identity of the whole, and cannot do so where they bring one.
            fitted, more = _admit_one(child, here, "engine_id")
            fitted.pop("kv_load_failure_policy", None)
            said += [sentence for sentence in more if sentence not in said]
            connectors[position] = fitted
    admitted["kv_connector_extra_config"] = {**fields["kv_connector_extra_config"], "connectors": connectors}
    if admitted.get("kv_load_failure_policy") == "fail":
        said.append(
            "kv_load_failure_policy of MultiConnector is 'fail', which ends each request of which a block cannot be "
            "loaded; leave it out or set it to 'recompute'"
        )
    return admitted, said


def check(fields: Mapping[str, Any], here: Installation) -> None:
    """Refuse settings of connectors of ours that are wrong, before an engine is started with them.

    Where the user lets an engine start without the cache, its connector says later what is wrong.

    Raises ConfigError: a setting is wrong, or two contradict each other.
    """
    children = _children(fields) if fields.get("kv_connector") == _MULTI else []
    for one in (fields, *children):
        extra = (one.get("kv_connector_extra_config") or {}) if _is_ours(one, here) else None
        if not isinstance(extra, Mapping) or extra.get("on_error") == "serve_without":
            continue
        if one["kv_connector"] == _PEER_TO_PEER:
            check_sizes(extra)
        else:
            read_settings(one.get("kv_role"), extra)


def _children(fields: Mapping[str, Any]) -> list[Any]:
    extra = fields.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    return children if isinstance(children, list) else []


def _is_ours(child: object, here: Installation) -> bool:
    name = child.get("kv_connector") if isinstance(child, Mapping) else None
    return isinstance(name, str) and name in here.ours


def _has_spec(child: object) -> bool:
    """Whether a child is vLLM's connector over the pool."""
    extra = child.get("kv_connector_extra_config") if isinstance(child, Mapping) else None
    return isinstance(extra, Mapping) and extra.get("spec_name") == "EmsOffloadingSpec"


def _admit_one(fields: Mapping[str, Any], here: Installation, *more: str) -> tuple[dict[str, Any], list[str]]:
    admitted = dict(fields)
    gone = [key for key in (*_LEFT_OUT, *more) if key in admitted and (key in more or key not in here.known)]
    if admitted.get("kv_buffer_device") == "npu" and here.device != "npu":
        gone.append("kv_buffer_device")
    module = admitted.get("kv_connector_module_path")
    if isinstance(module, str) and module.startswith("vllm_ascend") and not here.importable("vllm_ascend"):
        gone.append("kv_connector_module_path")
    for key in gone:
        del admitted[key]
    if isinstance(admitted.get("engine_id"), int):
        admitted["engine_id"] = str(admitted["engine_id"])
    if "kv_load_failure_policy" in here.known:
        admitted.setdefault("kv_load_failure_policy", "recompute")
    if not gone:
        return admitted, []
    return admitted, [f"accepted, but without a meaning for {fields['kv_connector']}: {', '.join(gone)}"]
