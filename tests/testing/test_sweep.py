"""What end-to-end tests remove from shared memory when they end: nothing that another engine, still starting, needs."""

from __future__ import annotations

import multiprocessing
from multiprocessing import synchronize

from tests.e2e.conftest import SHARED_MEMORY, in_use


def test_a_semaphore_that_only_its_maker_has_open_is_in_use() -> None:
    """The C library makes it under another name, which the maker's memory map goes on showing."""
    lock = multiprocessing.get_context("spawn").Lock()
    assert isinstance(lock, synchronize.Lock)
    file = SHARED_MEMORY / f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]

    assert file.stat().st_ino in in_use()
