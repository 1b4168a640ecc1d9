"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.kit.examples import USUAL
from tests.kit.node import NodeProcess
from tests.kit.tiers.bench import SECRET

NodeProcess.forked = True

# A shell starts what runs in its background deaf to interrupts, and so would be what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Temporary folders may be on a disk, which nodes refuse unless they are told.
os.environ.setdefault("EMS_ALLOW_DISK", "1")
# What is printed is folded to it; tests of that set it themselves.
os.environ.pop("COLUMNS", None)

# Time says nothing on a machine that has other things to do; `timeout` in pyproject.toml ends what hangs.
settings.register_profile(
    "ems",
    deadline=None,
    max_examples=USUAL,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=True,
)
# For the inner loop: `make check`.
settings.register_profile("quick", settings.get_profile("ems"), max_examples=USUAL // 6)
# Draws at random, and what it found before once more: `make explore`.
settings.register_profile(
    "explore",
    settings.get_profile("ems"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("ems")


@pytest.fixture(autouse=True, scope="session")
def _seal_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes of tests, in other processes too, seal their tiers with the key of ``tests.kit.tiers.KEYS``."""
    path = tmp_path_factory.mktemp("key") / "seal.key"
    path.touch(0o600)
    path.write_bytes(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMS_SEAL_KEY", str(path))
        yield


@pytest.fixture
def calls_take_a_minute(monkeypatch: pytest.MonkeyPatch) -> float:
    """A call to a pool node that names no time waits a minute for the answer.

    Returns half of that, in seconds: what kept to a time of its own took less, however slow the machine is.
    """
    monkeypatch.setattr("ems.pool.client.line.CALL_SECONDS", 60.0)
    return 30.0
