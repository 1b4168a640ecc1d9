"""Files that are replaced whole: whoever reads one sees what was there before or what was written, never a mixture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, new: Path, parts: Iterable[bytes | memoryview], *, sync: bool = False) -> None:
    """Put ``parts`` into ``path``, which is this user's alone then, by way of ``new``, a name beside it that is free.

    With ``sync`` it also outlives a power cut.  Raises OSError: it cannot be written; what was there stays.
    """
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(descriptor)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
