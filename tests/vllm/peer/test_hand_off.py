"""The scheduler's halves of the hand-off from peer to peer: what vLLM's transport connectors are told and answer."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from ems.errors import ConfigError
from ems.vllm.peer.mooncake import MooncakeHandOff
from ems.vllm.peer.nixl import NixlHandOff
from tests.kit.engine import free_port

Make = Callable[..., Any]
SIZES = {"prefill": {"dp_size": 1, "tp_size": 1}, "decode": {"dp_size": 1, "tp_size": 1}}


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes away again
        monkeypatch.delenv(name)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def engine(role: str, port: int, instance: str = "17", **parallel: int) -> Any:
    from vllm.config.kv_transfer import KVTransferConfig

    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "master_addr": "10.0.0.1",
        "master_port": 29501,
    }
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeConnectorV1",
            kv_role=role,
            kv_port=port,
            engine_id="0",
            kv_connector_extra_config={"use_ascend_direct": True, "kv_lease_duration": 60, **SIZES},
        ),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        cache_config=SimpleNamespace(block_size=16, mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        num_prefill_lookahead_tokens=0,
        instance_id=instance,
    )


def groups() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])


@pytest.fixture
def over_nixl() -> Iterator[Make]:
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(NixlHandOff(engine(*args, **kwargs), KVConnectorRole.SCHEDULER, groups()))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


@pytest.fixture
def over_mooncake() -> Make:
    return lambda *args, **kwargs: MooncakeHandOff(engine(*args, **kwargs), KVConnectorRole.SCHEDULER, groups())


def make_request(**params: object) -> Any:
    return SimpleNamespace(
        request_id="cmpl-1",
        kv_transfer_params=params or None,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_computed_tokens=32,
        num_prompt_tokens=32,
    )


def test_equal_files_make_different_engines(over_nixl: Make, taken_port: int) -> None:
    made = [over_nixl(role, taken_port, start) for role in ("kv_producer", "kv_consumer") for start in ("17", "18")]

    assert len({connector.connector_scheduler.engine_id for connector in made}) == 4
    assert all(taken_port != connector.connector_scheduler.side_channel_port for connector in made)


def test_a_port_that_is_taken_is_said(over_nixl: Make, taken_port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ems")
    connector = over_nixl("kv_producer", taken_port)

    used = connector.connector_scheduler.side_channel_port
    assert f"port {taken_port} (kv_port) is taken on this machine, {used} is used instead" in caplog.messages


def test_engines_that_start_at_the_same_moment_do_not_take_one_port(over_nixl: Make) -> None:
    """None of them listens yet."""
    port = free_port()
    made = [over_nixl(role, port) for role in ("kv_producer", "kv_consumer")]

    first, second = [connector.connector_scheduler.side_channel_port for connector in made]
    assert first == port
    assert second != port

    made[0].shutdown()
    assert over_nixl("kv_producer", port).connector_scheduler.side_channel_port == port


def test_each_rank_has_the_port_after_the_one_before(over_nixl: Make) -> None:
    port = free_port()
    connector = over_nixl("kv_producer", port - 1, data_parallel_index=1)

    assert connector.connector_scheduler.side_channel_port == port


def test_the_variables_of_the_transport_go_first(
    over_nixl: Make, monkeypatch: pytest.MonkeyPatch, taken_port: int
) -> None:
    port = free_port()
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))

    scheduler = over_nixl("kv_producer", taken_port).connector_scheduler
    assert (scheduler.side_channel_host, scheduler.side_channel_port) == ("localhost", port)


def test_all_machines_of_one_engine_call_it_the_same(over_nixl: Make) -> None:
    port = free_port()
    names = {over_nixl("kv_producer", port, start, nnodes=2).connector_scheduler.engine_id for start in ("17", "18")}

    assert names == {"0-kv_producer-10.0.0.1:29501"}


def test_an_address_of_another_machine_is_refused(over_nixl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "192.0.2.77")

    with pytest.raises(ConfigError, match=r"this machine cannot listen on its address '192\.0\.2\.77'"):
        over_nixl("kv_producer", 20001)


@pytest.mark.parametrize("port", [0, 65535])
def test_a_port_that_is_none_is_refused(over_nixl: Make, port: int) -> None:
    with pytest.raises(ConfigError, match=r"kv_port \(plus the data-parallel rank\) is .*, expected 1 to 65535"):
        over_nixl("kv_producer", port, data_parallel_index=port and 1)


def test_sizes_and_context_parallelism_that_do_not_fit_are_refused(over_nixl: Make) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.tp_size is 1, but this engine runs with --tensor-parallel-size 2"):
        over_nixl("kv_producer", 20001, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--decode-context-parallel-size is 2"):
        over_nixl("kv_producer", 20001, decode_context_parallel_size=2)


def test_the_callers_configuration_stays_as_it_was() -> None:
    config = engine("kv_producer", 20001)
    connector = NixlHandOff(config, KVConnectorRole.SCHEDULER, groups())
    connector.shutdown()

    assert config.kv_transfer_config.engine_id == "0"
    assert "use_ascend_direct" in config.kv_transfer_config.kv_connector_extra_config
    assert connector.kv_transfer_config.kv_connector_extra_config == {"kv_lease_duration": 60}


def test_a_prefill_over_nixl_answers_with_its_own_address(over_nixl: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ems")
    prefill = over_nixl("kv_producer", free_port())

    keep, answer = prefill.request_finished_all_groups(make_request(do_remote_decode=True), ([3, 4],))

    assert keep
    assert answer["remote_engine_id"] == "0-kv_producer-17"
    assert (answer["remote_host"], answer["remote_port"]) == (
        "127.0.0.1",
        prefill.connector_scheduler.side_channel_port,
    )
    assert "Delaying free of 2 blocks for request cmpl-1" in caplog.messages


class Blocks:
    """What the engine gave a request."""

    blocks: tuple[list[Any], ...] = ([],)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        return [[7, 8]]


@pytest.mark.parametrize("transport", ["over_nixl", "over_mooncake"])
def test_a_decode_says_how_long_a_transfer_took(
    transport: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.ems")
    decode = request.getfixturevalue(transport)("kv_consumer", free_port())
    decode.update_state_after_alloc(make_request(), Blocks(), 32)
    output = SimpleNamespace(finished_recving={"cmpl-1", "unknown"})

    decode.update_connector_output(output)
    decode.update_connector_output(output)

    lines = [line for line in caplog.messages if line.startswith("KV cache transfer for request cmpl-1 took ")]
    assert len(lines) == 1


def test_over_mooncake_the_prefill_names_the_transfer_and_where_to_ask(over_mooncake: Make) -> None:
    prefill, decode = over_mooncake("kv_producer", 20011), over_mooncake("kv_consumer", 20011)
    assert os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "20011"
    sent = make_request(do_remote_decode=True, do_remote_prefill=False)
    prefill.on_new_request(sent)

    keep, answer = prefill.request_finished_all_groups(sent, ([3, 4],))

    assert keep
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "cmpl-1",
        "remote_engine_id": "0-kv_producer-17",
        "remote_bootstrap_addr": "http://127.0.0.1:20011",
    }
    # ... and that is all that the decode needs.
    taken = make_request(**answer)
    decode.on_new_request(taken)
    decode.update_state_after_alloc(taken, Blocks(), 32)
    (pulls,) = decode.build_connector_meta(SimpleNamespace()).reqs_to_recv.values()
    assert pulls["cmpl-1"].transfer_id == "cmpl-1"
    assert pulls["cmpl-1"].remote_bootstrap_addr == "http://127.0.0.1:20011"


def test_over_mooncake_requests_without_a_hand_off_pass(over_mooncake: Make) -> None:
    prefill = over_mooncake("kv_producer", 20011)
    plain = make_request()
    prefill.on_new_request(plain)

    assert prefill.request_finished_all_groups(plain, ([3, 4],)) == (False, None)


IDLE = """
import os, time
from nixl._api import nixl_agent, nixl_agent_config
from ems.vllm.peer.nixl import resting_agents

with resting_agents():
    agent = nixl_agent("rests", nixl_agent_config(num_threads=4))
begin = time.process_time()
time.sleep(1)  # the second that is measured
print(time.process_time() - begin, flush=True)
os._exit(0)  # libraries of NIXL's own and the system's like of them clash where a process ends in the usual way
"""


@pytest.mark.process
def test_on_a_cpu_the_transports_thread_leaves_the_cores_to_others() -> None:
    """It took a whole core: what is measured is processor time, whatever else the machine does meanwhile."""
    told = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True).stdout

    assert float(told.split()[-1]) < 0.3


@pytest.mark.parametrize(("role", "rests"), [(KVConnectorRole.WORKER, True), (KVConnectorRole.SCHEDULER, False)])
def test_a_workers_agent_rests_and_no_other(
    monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole, rests: bool
) -> None:
    from nixl._api import nixlBind
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    make = nixlBind.nixlAgent
    seen: list[bool] = []

    def begin(self: Any, *_: object) -> None:
        seen.append(nixlBind.nixlAgent is not make)
        self.connector_scheduler = SimpleNamespace()

    monkeypatch.setattr(NixlConnector, "__init__", begin)

    made = NixlHandOff(engine("kv_producer", free_port()), role, groups())
    if role is KVConnectorRole.SCHEDULER:
        made._place.close()

    assert seen == [rests]
    assert nixlBind.nixlAgent is make
