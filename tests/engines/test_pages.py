"""What engines say of themselves on their pages."""

from __future__ import annotations

import json

import pytest

from ems.engines.pages import metrics_of, models_of
from tests.engines.engine_pages import sglang, vllm


def test_figures_of_vllm_and_of_sglang() -> None:
    expected = {
        "running": 3,
        "waiting": 2,
        "kv_usage": 0.25,
        "ttft_sum": 4,
        "ttft_count": 8,
        "tpot_sum": 0.5,
        "tpot_count": 50,
    }

    for page in (vllm, sglang):
        assert metrics_of(page(running=3, waiting=2, kv_usage=0.25, ttft=(4, 8), tpot=(0.5, 50))) == expected


def test_ranks_are_added_up_and_their_usage_is_averaged() -> None:
    page = vllm(running=3, kv_usage=0.25, rank=0) + vllm(running=4, waiting=1, kv_usage=0.75, rank=1)

    assert metrics_of(page) == {"running": 7, "waiting": 1, "kv_usage": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running{model_name="a} b \\" , }"} 3.0 1700000000000',
        b"vllm:num_requests_running 3",
        b"vllm:num_requests_running{} 3e0\r",
    ],
)
def test_labels_and_timestamps_do_not_matter(line: bytes) -> None:
    noise = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running_more 9\nother:num_requests_running 8\n"

    assert metrics_of(noise + line + b"\n" + noise) == {"running": 3}


def test_models_are_those_of_a_list() -> None:
    listed = {"object": "list", "data": [{"id": "m", "root": "/m"}, {"id": "fine", "parent": "m"}]}

    assert list(models_of(json.dumps(listed).encode())) == ["m", "fine"]
    for page in (b"", b"[]", b'{"data": [{"name": "m"}]}', b"\xff", b'{"data": ' + b"[" * 5000):
        assert models_of(page) == {}
