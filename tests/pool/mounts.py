"""Small file systems in memory, for which one must be root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own at the new folder ``path``."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ems-test", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
