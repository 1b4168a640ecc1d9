"""``memcpy`` for a whole list of copies in one call, during which the interpreter is free.

Compiled when it is first needed, which takes a fifth of a second: the call for each copy would cost more than most
copies, and would take the interpreter from the engine each time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from ems.transfers.plan import Numbers

STEP_BYTES = 2 << 20
"""What is copied in one call, so that who calls a copy off does not wait."""
SUMMED_BYTES = 512 << 10
"""The same where checksums follow: so little that it, and what it was copied from, are in the cache of the core."""


@functools.cache
def memcpy_all() -> Callable[[Numbers, Numbers, Numbers], None]:
    """The call; it takes targets, sources and sizes."""
    import numba  # type: ignore[import-untyped, unused-ignore]

    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p

    @numba.njit("void(int64[::1], int64[::1], int64[::1])", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def copy(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        for number in range(len(sizes)):
            memcpy(targets[number], sources[number], sizes[number])

    return copy  # type: ignore[no-any-return, unused-ignore]
