"""A wrong argument is the caller's fault: one sentence, one code, and the service is as well as before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ems import CcKvOption, Ems, EmsErrorCode, EmsException
from tests.cc_v1.conftest import OPTION, make_caches, same, tokens, zeros_like
from tests.kit.node import NodeProcess

if TYPE_CHECKING:
    from ems.cc_v1.context_caching import ContextCaching
    from tests.cc_v1.conftest import Connect


@pytest.fixture
def cc(node: NodeProcess, connect: Connect) -> ContextCaching:
    """Eight blocks of four tokens are registered."""
    connected = connect(node)
    connected.register_kvcache(make_caches())
    return connected


def option(timeout: Any) -> CcKvOption:
    return CcKvOption(write_rcache=True, read_local_only=False, timeout=timeout)


TRANSFERS = {
    "slots are missing": (range(7), [1, 2], [4, 4], "slot_mapping has 7 entries, but the offsets sum to 8"),
    "slots are left over": (range(9), [1, 2], [4, 4], "slot_mapping has 9 entries"),
    "offsets are missing": (range(4), [1, 2], [4], "1 offsets for 2 hashes"),
    "hashes are missing": (range(8), [1], [4, 4], "2 offsets for 1 hashes"),
    "a block is too long": (range(5), [1], [5], "offset 0 is 5, expected 1 to 4 tokens"),
    "a block has no token": (range(4), [1, 2], [4, 0], "offset 1 is 0"),
    "a block is negative": (range(4), [1, 2], [5, -1], "offset 0 is 5"),
    "a slot is too high": ([0, 1, 2, 32], [1], [4], "slots 0 to 32, but the registered caches have slots 0 to 31"),
    "a slot is negative": ([-1, 1, 2, 3], [1], [4], "slots -1 to 3"),
    "slots are fractions": ([0.0, 1.0, 2.0, 3.5], [1], [4], "whole numbers"),
    "slots are a fractional tensor": (torch.zeros(4), [1], [4], "whole numbers"),
    "slots are a table": (torch.zeros(2, 2, dtype=torch.int64), [1], [4], "2 dimensions"),
    "slots are ragged": ([[1], [2, 3]], [1], [4], "whole numbers"),
    "slots are text": ("abcd", [1], [4], "whole numbers"),
    "slots are truths": (np.ones(4, dtype=bool), [1], [4], "whole numbers"),
    "slots are huge": ([1 << 70, 1, 2, 3], [1], [4], "whole numbers"),
    "hashes are text": (range(4), ["x"], [4], "hashes is not a sequence of whole numbers"),
    "hashes are bytes": (range(4), [b"x"], [4], "hashes is not a sequence of whole numbers"),
    "hashes are nothing": (range(4), None, [4], "hashes is not a sequence of whole numbers"),
    "offsets are fractions": (range(4), [1], [4.0], "offsets is not a sequence of whole numbers"),
}


@pytest.mark.parametrize("verb", ["async_load", "async_save"])
@pytest.mark.parametrize("case", TRANSFERS.values(), ids=TRANSFERS.keys())
def test_transfers_that_make_no_sense(cc: ContextCaching, verb: str, case: tuple[Any, Any, Any, str]) -> None:
    slots, hashes, offsets, sentence = case
    with pytest.raises(EmsException, match=sentence) as caught:
        getattr(cc, verb)(slots, hashes, offsets, OPTION)
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.check_health()
    assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5000", None, True])
def test_a_time_out_that_is_none(cc: ContextCaching, timeout: Any) -> None:
    for call in (
        lambda: cc.exists([1], option(timeout)),
        lambda: cc.async_load(range(4), [1], [4], option(timeout)),
        lambda: cc.async_save(range(4), [1], [4], option(timeout)),
    ):
        with pytest.raises(EmsException, match=r"option\.timeout is") as caught:
            call()
        assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.check_health()


def test_an_option_that_is_none(cc: ContextCaching) -> None:
    with pytest.raises(EmsException, match="option is a dict, expected a CcKvOption or None") as caught:
        cc.exists([1], {"timeout": 5000})  # type: ignore[arg-type]  # on purpose
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT


def test_an_engine_that_names_no_model_is_told_of(cc: ContextCaching, caplog: pytest.LogCaptureFixture) -> None:
    cc.register_kvcache(make_caches())
    assert "model name" not in caplog.text
    cc._config.cc_config_v1.llm_engine = "vllm"
    cc.register_kvcache(make_caches())
    assert "llm_engine is 'vllm', expected 'engine@model name'" in caplog.text


@pytest.mark.parametrize("hashes", [["x"], [1.5], 7, None, [b"ab"]])
def test_a_lookup_of_what_is_no_hash(cc: ContextCaching, hashes: Any) -> None:
    with pytest.raises(EmsException, match="hashes is not a sequence of whole numbers") as caught:
        cc.exists(hashes, OPTION)
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.check_health()


@pytest.mark.parametrize("timeout", [10**30, pytest.param(10**400, id="no float"), float("inf"), 1500.5])
def test_time_outs_that_are_only_unusual(cc: ContextCaching, timeout: Any) -> None:
    assert cc.get_result(cc.async_save(range(4), [1], [4], option(timeout))).success == 1
    assert cc.exists([1], option(timeout)).success == 1


def test_no_time_at_all(cc: ContextCaching) -> None:
    cc.get_result(cc.async_save(range(4), [1], [4], OPTION))
    assert cc.exists([1], option(0)).success == 0
    assert Ems.check_health()


def test_integers_of_other_libraries_are_integers(cc: ContextCaching) -> None:
    assert cc.get_result(cc.async_save(range(8), np.array([5, 6]), torch.tensor([4, 4]), OPTION)).success == 2
    mixed: list[Any] = [np.int64(5), torch.tensor(6)]
    assert cc.exists(mixed, OPTION).success == 2


@pytest.mark.parametrize("future", [None, object(), 7])
def test_what_is_no_future(cc: ContextCaching, future: Any) -> None:
    for call in (cc.is_ready, cc.get_result):
        with pytest.raises(EmsException, match="no future") as caught:
            call(future)
        assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT


CACHES = {
    "nothing": ([], "lacks tensors"),
    "a layer without tensors": ([[]], "lacks tensors"),
    "no lists": (7, "cannot be registered"),
    "no tensors": ([["k", "v"]], "expected a tensor"),
    "a flat tensor": ([[torch.zeros(8, 4)]], r"shape \(8, 4\), expected \[num_blocks"),
    "no blocks": ([[torch.zeros(0, 4, 2, 8)]], "expected .num_blocks"),
    "numbers of blocks": ([[torch.zeros(8, 4, 2, 8), torch.zeros(9, 4, 2, 8)]], "different numbers of blocks"),
    "block sizes": ([[torch.zeros(8, 4, 2, 8)], [torch.zeros(8, 2, 2, 8)]], "different block sizes"),
    "values in one place": ([[torch.zeros(1, 4, 2, 8).expand(8, 4, 2, 8)]], "expanded view"),
    "complex numbers": ([[torch.zeros(8, 4, 2, 8, dtype=torch.complex64)]], "plain numbers"),
}


@pytest.mark.parametrize("case", CACHES.values(), ids=CACHES.keys())
def test_caches_that_cannot_be_served(cc: ContextCaching, case: tuple[Any, str]) -> None:
    """They are refused, and the registration before stays."""
    caches, sentence = case
    with pytest.raises(EmsException, match=sentence) as caught:
        cc.register_kvcache(caches)
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.check_health()
    assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1


def test_a_bad_transfer_leaves_the_engines_memory_alone(cc: ContextCaching) -> None:
    cc.get_result(cc.async_save(range(4), [1], [4], OPTION))
    other = zeros_like(make_caches())
    cc.register_kvcache(other)
    with pytest.raises(EmsException):
        cc.async_load([0, 1, 2, 99], [1], [4], OPTION)
    assert same(tokens(other, range(32)), tokens(zeros_like(other), range(32)))


def test_before_a_registration(node: NodeProcess, connect: Connect) -> None:
    """A lookup answers nothing, for callers in the field take an exception for "all present"."""
    cc = connect(node)
    for verb in (cc.async_load, cc.async_save):
        with pytest.raises(EmsException, match="register_kvcache") as caught:
            verb(range(4), [1], [4], OPTION)
        assert caught.value.status_code() == EmsErrorCode.EMS_NOT_REGISTERED
    assert cc.exists([1], OPTION).success == 0
    assert Ems.check_health()
