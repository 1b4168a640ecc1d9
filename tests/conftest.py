"""What holds for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from ems.pool.client.line import CALL_SECONDS
from ems.pool.client.pool_client import PoolClient

# Time says nothing on a machine that has other things to do; `timeout` in pyproject.toml ends what hangs.
settings.register_profile(
    "ems",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=True,
)
# For the inner loop: `make check`.
settings.register_profile("quick", settings.get_profile("ems"), max_examples=15)
# Draws at random, and what it found before once more: `make explore`.
settings.register_profile(
    "explore",
    settings.get_profile("ems"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("ems")


@pytest.fixture
def calls_take_a_minute(monkeypatch: pytest.MonkeyPatch) -> float:
    """A call to a pool node that names no time waits a minute for the answer.

    Returns half of that, in seconds: what kept to a time of its own took less, however slow the machine is.
    """
    for module in ("line", "pool_client"):
        monkeypatch.setattr(f"ems.pool.client.{module}.CALL_SECONDS", 60.0)
    for verb in vars(PoolClient).values():
        named = getattr(verb, "__defaults__", None)
        if named:
            longer = tuple(60.0 if default == CALL_SECONDS else default for default in named)
            monkeypatch.setattr(verb, "__defaults__", longer)
        by_name = getattr(verb, "__kwdefaults__", None)
        if by_name and "timeout" in by_name:
            monkeypatch.setitem(by_name, "timeout", 60.0)
    return 30.0
