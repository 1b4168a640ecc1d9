"""``Ems``: connecting, nodes that start by themselves, sessions that end, processes that fork."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import ems
from ems import CcConfig_v1, CcKvOption, Ems, EmsConfig, EmsErrorCode, EmsException
from ems.cc_v1.cc_config import KVCacheType
from ems.cc_v1.errors import code_of
from ems.errors import ConfigError, NoSpace, PoolRefused, Unauthorised, VersionMismatch
from ems.pool.client.pool_client import PoolClient
from tests.cc_v1.conftest import OPTION, QUICK, make_caches, rank_config
from tests.kit.node import NodeProcess
from tests.kit.waiting import until

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cc_v1.conftest import Connect


ENGINE = """
from ems import CcConfig_v1, Ems, EmsConfig
rank = CcConfig_v1(rank_id=0, device_id=0, model_id="m", tp_world_size=1, pp_world_size=1,
                   rank_in_tp_group=0, rank_in_pp_group=0, llm_engine="vllm@m")
Ems.init(EmsConfig(access_id="", access_key="", cc_config_v1=rank))
print(Ems.check_health())
"""

ENGINE_OF = """
from pathlib import Path
from ems import *
from ems.cc_v1.transfers import Transfers
from ems.config import NodeConfig
from ems.pool.client.answers import Namespace

rank = CcConfig_v1(rank_id=0, device_id=0, model_id="m", tp_world_size=1, pp_world_size=1,
                   rank_in_tp_group=0, rank_in_pp_group=0, llm_engine="vllm@m")
directory = Path({directory!r})
node = NodeConfig(directory=directory, socket=directory / "node.sock")
config = EmsConfig(access_id="", access_key="", cc_config_v1=rank, autostart=False, node=node)
Ems.init(config)
"""


@pytest.fixture
def closed() -> Iterator[None]:
    """The process begins and ends without a session."""
    yield
    Ems.close()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a node that the SDK starts, as the environment names it; the node ends with the test."""
    directory = Path(tempfile.mkdtemp(prefix="ems-test-", dir="/dev/shm"))
    monkeypatch.setenv("EMS_DIR", str(directory))
    monkeypatch.delenv("EMS_SOCKET", raising=False)
    monkeypatch.setenv("EMS_POOL_SIZE", "16MB")
    yield directory
    Ems.close()  # or it would start the node again
    until(lambda: not {thread.name for thread in threading.enumerate()} & {"ems-monitor", "ems-start"})
    for process in nodes_of(directory):
        end(process, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def nodes_of(directory: Path) -> list[psutil.Process]:
    """Node processes that serve ``directory``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []  # nothing, when it ended
        if "node" in command and str(directory) in command:
            found.append(process)
    return found


def end(process: psutil.Process, number: signal.Signals) -> None:
    """Returns once the process does nothing more; whose child it is may take its time to notice."""
    process.send_signal(number)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def config(**changes: Any) -> EmsConfig:
    facts: dict[str, Any] = {"access_id": "", "access_key": "", "cc_config_v1": rank_config(), "health": QUICK}
    return EmsConfig(**(facts | changes))


def init_code(wanted: EmsConfig) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        Ems.init(wanted)
    assert len(str(caught.value)) > 10
    return caught.value.status_code()


@pytest.mark.usefixtures("closed")
class TestInit:
    def test_it_starts_a_node_by_itself(self, home: Path) -> None:
        assert not Ems.check_health()
        Ems.init(config())
        assert Ems.check_health()
        assert len(nodes_of(home)) == 1
        cc = Ems.get_cc()
        cc.register_kvcache(make_caches())
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1

    def test_one_node_however_many_ranks_start_at_once(self, home: Path) -> None:
        ranks = [subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE) for _ in range(4)]
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert said == [b"True\n"] * 4
        assert len(nodes_of(home)) == 1

    def test_the_node_outlives_the_engine(self, home: Path) -> None:
        subprocess.run([sys.executable, "-c", ENGINE], check=True)
        assert Ems.check_health()
        assert len(nodes_of(home)) == 1

    @pytest.mark.parametrize("way", ["environment", "attribute"])
    def test_starting_can_be_forbidden(self, home: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        if way == "environment":
            monkeypatch.setenv("EMS_AUTOSTART", "0")
        wanted = config(autostart=way != "attribute")
        assert init_code(wanted) == EmsErrorCode.EMS_RECOVERD_ERROR
        assert not Ems.check_health()
        assert nodes_of(home) == []

    def test_a_node_that_cannot_start_may_do_so_later(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EMS_POOL_SIZE", "9999GB")
        with pytest.raises(EmsException, match="does not fit") as caught:
            Ems.init(config())
        assert caught.value.status_code() == EmsErrorCode.EMS_RECOVERD_ERROR
        assert caught.value.transient

    def test_check_health_starts_the_node_that_init_could_not(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EMS_POOL_SIZE", "9999GB")
        assert init_code(config()) == EmsErrorCode.EMS_RECOVERD_ERROR
        monkeypatch.setenv("EMS_POOL_SIZE", "16MB")
        until(Ems.check_health)
        Ems.init(config())
        assert len(nodes_of(home)) == 1

    def test_it_succeeds_once_somebody_started_a_node(self, fragile_node: NodeProcess) -> None:
        fragile_node.kill()
        wanted = config(autostart=False, node=fragile_node.config)
        assert init_code(wanted) == EmsErrorCode.EMS_RECOVERD_ERROR
        assert not Ems.check_health()
        fragile_node.start()
        until(Ems.check_health)
        Ems.init(wanted)
        assert Ems.check_health()

    def test_a_node_that_hangs_is_not_waited_for_long(
        self, fragile_node: NodeProcess, calls_take_a_minute: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ems.cc_v1.ems.CONNECT_SECONDS", 1.0)
        monkeypatch.setattr("ems.cc_v1.ems.PROBE_EVERY", 3600.0)
        fragile_node.send(signal.SIGSTOP)
        begin = time.monotonic()
        assert init_code(config(node=fragile_node.config)) == EmsErrorCode.EMS_RECOVERD_ERROR
        assert time.monotonic() - begin < calls_take_a_minute, "it waited as long as a call does that names no time"
        begin = time.monotonic()
        assert not Ems.check_health()
        assert time.monotonic() - begin < calls_take_a_minute
        monkeypatch.setattr("ems.cc_v1.ems.PROBE_SECONDS", 40.0)
        begin = time.monotonic()
        assert not Ems.check_health()
        assert time.monotonic() - begin < 20.0, "the node was asked again at once"

    def test_again_with_the_same_configuration_nothing_happens(self, node: NodeProcess) -> None:
        Ems.init(config(autostart=False, node=node.config))
        cc = Ems.get_cc()
        cc.register_kvcache(make_caches())
        Ems.init(config(autostart=False, node=node.config))
        assert Ems.get_cc() is cc
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1

    def test_with_another_configuration_the_old_session_ends(self, node: NodeProcess) -> None:
        Ems.init(config(autostart=False, node=node.config))
        old = Ems.get_cc()
        old.register_kvcache(make_caches())
        Ems.init(config(autostart=False, node=node.config, cc_config_v1=rank_config("another model")))
        new = Ems.get_cc()
        assert new is not old
        new.register_kvcache(make_caches())
        assert new.get_result(new.async_save(range(4), [1], [4], OPTION)).success == 1

        assert old.exists([1], OPTION).success == 0
        for call in (lambda: old.async_save(range(4), [1], [4], OPTION), lambda: old.register_kvcache(make_caches())):
            with pytest.raises(EmsException) as caught:
                call()
            assert caught.value.status_code() == EmsErrorCode.EMS_NOT_INITIALISED

    def test_from_many_threads_there_is_one_session(self, node: NodeProcess) -> None:
        objects = []

        def connect() -> None:
            Ems.init(config(autostart=False, node=node.config))
            objects.append(Ems.get_cc())

        threads = [threading.Thread(target=connect) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, objects))) == 1

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"tp_world_size": 0}, "tp_world_size is 0"),
            ({"rank_in_tp_group": 2, "tp_world_size": 2}, "rank_in_tp_group is 2, expected less than"),
            ({"rank_in_pp_group": 1}, "rank_in_pp_group is 1, expected less than"),
            ({"rank_id": -1}, "rank_id is -1"),
            ({"device_id": "0"}, "device_id is '0'"),
            ({"pp_world_size": True}, "pp_world_size is True"),
            ({"model_id": ""}, "model_id is empty"),
            ({"llm_engine": None}, "llm_engine is a NoneType"),
            ({"model_id": "a\0model"}, "model_id has characters that cannot be printed"),
            ({"llm_engine": "vllm@\ud800"}, "llm_engine has characters that cannot be printed"),
            ({"model_id": "m" * 400}, "model_id and llm_engine have 412 characters, expected at most 340"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_configurations_that_make_no_sense(self, change: dict[str, Any], sentence: str) -> None:
        with pytest.raises(EmsException, match=sentence) as caught:
            Ems.init(config(cc_config_v1=rank_config(**change)))
        assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT

    def test_other_things_that_are_no_configuration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong_kind = rank_config()
        wrong_kind.kvcache_type = "MLA"  # type: ignore[assignment]
        wrong: list[Any] = [
            None,
            config(cc_config_v1=None),
            config(access_id=7),
            config(access_id="a\nb"),
            config(access_id="a" * 129),
            config(summary_seconds=0),
            config(cc_config_v1=wrong_kind),
        ]
        for each in wrong:
            assert init_code(each) == EmsErrorCode.EMS_INVALID_ARGUMENT
        monkeypatch.setenv("EMS_AUTOSTART", "perhaps")
        assert init_code(config()) == EmsErrorCode.EMS_INVALID_ARGUMENT
        monkeypatch.delenv("EMS_AUTOSTART")
        monkeypatch.setenv("EMS_SOCKET", "/" + "x" * 200)
        assert init_code(config()) == EmsErrorCode.EMS_INVALID_ARGUMENT
        assert not Ems.check_health()

    def test_without_a_session_there_is_no_object(self) -> None:
        with pytest.raises(EmsException, match=r"Ems\.init") as caught:
            Ems.get_cc()
        assert caught.value.status_code() == EmsErrorCode.EMS_NOT_INITIALISED


class TestRevival:
    @pytest.mark.usefixtures("closed")
    def test_a_node_that_an_engine_started_is_started_again_when_it_crashed(self, home: Path) -> None:
        Ems.init(config())
        cc = Ems.get_cc()
        cc.register_kvcache(make_caches())
        (first,) = nodes_of(home)
        end(first, signal.SIGKILL)
        until(lambda: bool(nodes_of(home)))
        until(Ems.check_health)
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1

    @pytest.mark.usefixtures("closed")
    def test_not_when_it_was_stopped(self, home: Path) -> None:
        Ems.init(config())
        (first,) = nodes_of(home)
        end(first, signal.SIGTERM)
        until(lambda: not Ems.check_health())
        checks = _count_checks()
        until(lambda: checks() >= 3)
        assert nodes_of(home) == []

    def test_nor_one_that_somebody_else_runs(self, fragile_node: NodeProcess, connect: Connect) -> None:
        connect(fragile_node)
        session = Ems._session
        assert session is not None
        session._revives = True
        fragile_node.kill()
        until(lambda: not Ems.check_health())
        checks = _count_checks()
        until(lambda: checks() >= 3)
        assert nodes_of(fragile_node.directory) == []


def _count_checks() -> Any:
    """Counts the health checks of the present session from now on."""
    session = Ems._session
    assert session is not None
    done: list[int] = []
    check = session.monitor._check

    def counted() -> None:
        try:
            check()
        finally:
            done.append(1)

    session.monitor._check = counted
    return lambda: len(done)


def test_closing_is_harmless_and_leaves_no_thread(node: NodeProcess, connect: Connect) -> None:
    cc = connect(node)
    cc.register_kvcache(make_caches())
    cc.get_result(cc.async_save(range(4), [1], [4], OPTION))
    Ems.close()
    Ems.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ems-")])
    assert cc.exists([1], OPTION).success == 0
    connect(node)
    assert Ems.get_cc() is not cc


def test_closing_does_not_wait_for_a_node_that_hangs(
    fragile_node: NodeProcess, connect: Connect, calls_take_a_minute: float
) -> None:
    cc = connect(fragile_node)
    cc.register_kvcache(make_caches())
    cc.get_result(cc.async_save(range(4), [1], [4], OPTION))
    fragile_node.send(signal.SIGSTOP)
    future = cc.async_load(range(4), [1], [4], CcKvOption(write_rcache=True, read_local_only=False, timeout=60_000))
    begin = time.monotonic()
    Ems.close()
    assert time.monotonic() - begin < calls_take_a_minute, "it waited for a call to the node"
    with pytest.raises(EmsException):
        cc.get_result(future)


def test_a_forked_child_has_no_session_and_does_no_harm(node: NodeProcess) -> None:
    script = ENGINE_OF.format(directory=str(node.directory)) + textwrap.dedent(
        """
        import os
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)
        cc = Ems.get_cc()
        cc.transfers = Transfers(cc._pages, None, None, Namespace("forked", 64))
        assert cc.exists([1], option).success == 0 and Ems.check_health()
        epoch = cc._lookups.epoch
        child = os.fork()
        if child == 0:
            fine = Ems._session is None and cc.exists([1], option).success == 0 and not cc._lookups.epoch
            Ems.init(config)
            fine = fine and Ems.get_cc() is not cc and Ems.check_health()
            os._exit(0 if fine else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert cc.exists([1], option).success == 0 and Ems.check_health()
        assert cc._lookups.epoch == epoch
        print("well")
        """
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == "well\n", ended.stderr


def test_the_node_knows_who_is_connected(node: NodeProcess, connect: Connect) -> None:
    connect(node)
    client = PoolClient(node.config.socket)
    until(lambda: client.stats()["clients"] == 3, seconds=10.0)
    Ems.close()
    until(lambda: client.stats()["clients"] == 1, seconds=10.0)
    client.close()


def test_torch_is_not_needed_before_caches_are_registered(node: NodeProcess) -> None:
    script = ENGINE_OF.format(directory=str(node.directory)) + textwrap.dedent(
        """
        import sys
        Ems.get_cc().exists([1], CcKvOption(write_rcache=True, read_local_only=False, timeout=5000))
        print([name for name in ("torch", "starlette", "aiohttp", "structlog") if name in sys.modules])
        """
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == "[]\n", ended.stderr


class TestNames:
    """The contract's names, as integrations write them."""

    def test_public_names(self) -> None:
        assert {"Ems", "EmsConfig", "CcConfig_v1", "CcKvOption", "EmsException", "EmsErrorCode"} <= set(ems.__all__)
        assert {"EMS_INVALID_ARGUMENT", "EMS_RECOVERD_ERROR", "EMS_INTERNAL_ERROR"} <= {c.name for c in EmsErrorCode}

    def test_configuration(self) -> None:
        rank = CcConfig_v1(
            rank_id=1,
            device_id=2,
            model_id="cc_kvstore@_@ds_default_ns_001",
            tp_world_size=4,
            pp_world_size=1,
            rank_in_tp_group=1,
            rank_in_pp_group=0,
            llm_engine="vllm@models_Qwen2.5-7B-Instruct",
        )
        assert rank.kvcache_type is KVCacheType.MHA
        rank.kvcache_type = KVCacheType.MLA
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)
        assert (option.write_rcache, option.read_local_only, option.timeout) == (True, False, 5000)
        secret = EmsConfig(access_id="id", access_key="very secret", cc_config_v1=rank)
        assert "very secret" not in repr(secret)
        assert "vllm@models_Qwen2.5-7B-Instruct" in repr(secret)
        assert "5000" in repr(option)

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (Unauthorised("no"), EmsErrorCode.EMS_UNAUTHORISED),
            (VersionMismatch("no"), EmsErrorCode.EMS_VERSION_MISMATCH),
            (NoSpace("no"), EmsErrorCode.EMS_NO_SPACE),
            (ConfigError("no"), EmsErrorCode.EMS_INVALID_ARGUMENT),
            (PoolRefused("no"), EmsErrorCode.EMS_INTERNAL_ERROR),
        ],
        ids=lambda value: value.name if isinstance(value, EmsErrorCode) else "",
    )
    def test_every_error_has_a_code(self, error: Any, code: EmsErrorCode) -> None:
        assert code_of(error) is code
        assert not EmsException("no", code).transient

    def test_an_exception_tells_its_code(self) -> None:
        error = EmsException("it broke", EmsErrorCode.EMS_TIMEOUT)
        assert error.status_code().name == "EMS_TIMEOUT"
        assert error.transient
        assert str(error) == "it broke"
