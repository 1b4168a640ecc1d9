"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

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
