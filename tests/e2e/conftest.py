"""Fixtures that all end-to-end tests share: the model, the engine without a connector, a clean shared memory."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.engines import OPTIONS, Reference
from tests.kit.prepared import PreparedServer
from tests.kit.tiny_model import make_model

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session", autouse=True)
def _sweep() -> Iterator[None]:
    """Engines that tests kill cannot remove their own message queues from shared memory; nobody else does."""
    before = set(SHARED_MEMORY.iterdir())
    yield
    left = {
        file
        for file in set(SHARED_MEMORY.iterdir()) - before
        if file.name.startswith(("psm_", "sem.mp-", "vllm_dist_"))
    }
    used = in_use()
    for file in left:
        with suppress(FileNotFoundError):
            if file.stat().st_ino not in used:
                file.unlink()


def in_use() -> set[int]:
    """Inodes of shared memory that some process has mapped: engines of somebody else may start here meanwhile.

    Not their names: a semaphore has another one while it is made, and that one its maker's map shows.
    """
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # the process ended, or is another user's
            continue
        inodes |= {int(inode) for inode in re.findall(rf" ([0-9]+) +{SHARED_MEMORY}/", text)}
    return inodes


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "test")


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without ``head_dim`` in its configuration, as many are published."""
    model = make_model(tmp_path_factory.mktemp("bare") / "tiny", "test")
    path = model / "config.json"
    config = json.loads(path.read_text())
    del config["head_dim"]
    path.write_text(json.dumps(config))
    return model


LOGS = pytest.StashKey[Path]()
SIZES = pytest.StashKey[dict[Path, int]]()
SAID_LINES = 15


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    folder = pytestconfig.stash[LOGS] = tmp_path_factory.mktemp("logs")
    return folder


def server_logs(config: pytest.Config) -> list[Path]:
    folder = config.stash.get(LOGS, None)
    return [] if folder is None else sorted(folder.rglob("*.log"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[SIZES] = {log: log.stat().st_size for log in server_logs(item.config)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Beside a failure stands what the servers said of EMS, and what they complained of, since the test began."""
    report = yield
    if report.failed:
        for log in server_logs(item.config):
            lines = said(log, item.stash[SIZES].get(log, 0))
            if lines:
                report.sections.append((log.name, "\n".join(lines)))
    return report


def said(log: Path, begin: int) -> list[str]:
    """The last lines of a server's log behind byte ``begin`` that are about EMS or complain of something."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return [line[:400] for line in lines if re.search(r"ems|EMS|WARN|ERROR|Error|failed", line)][-SAID_LINES:]


@pytest.fixture(scope="session")
def reference(model: Path, logs: Path) -> Iterator[Reference]:
    with PreparedServer(model, log=logs / "reference.log", options=OPTIONS) as server:
        yield Reference(server.url)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting real servers takes minutes on a machine that is busy with something else."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
