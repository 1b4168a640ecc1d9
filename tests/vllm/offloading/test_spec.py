"""What is asked of the spec in vLLM's own keys and cannot be had."""

from __future__ import annotations

import pytest

from ems.errors import ConfigError
from ems.vllm.offloading.spec import check_loads, unused


def test_loads_within_a_step_are_refused() -> None:
    """vLLM 0.33 makes them if it may; it hears of the failure of a load between steps only."""
    check_loads({"sync_load_budget_bytes": 0})
    check_loads({})
    with pytest.raises(ConfigError, match="sync_load_budget_bytes"):
        check_loads({"sync_load_budget_bytes": 1 << 20})


def test_settings_that_mean_nothing_here_are_named() -> None:
    assert unused({"pool_size": "1GB", "tenant": "a"}) is None
    said = unused({"explain": True, "num_min_reuse_tokens": 512, "tenant": "a"})
    assert said == "EmsOffloadingSpec does not use explain, num_min_reuse_tokens; EmsStoreConnector does"
