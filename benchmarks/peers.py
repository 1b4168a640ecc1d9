#!/usr/bin/env python3
"""EMS beside the KV-cache pools that vLLM ships connectors for, and beside engines without a pool: one table.

    .venv/bin/python benchmarks/peers.py --install   once: puts the peers into .venv-peers, an environment of their own
    .venv/bin/python benchmarks/peers.py             the comparison: 90 minutes; --help lists what can be smaller

The peers never get into the project's own environment: .venv-peers borrows the engine from .venv and adds them without
their dependencies, of which a CPU needs a few.  All engines, with EMS and without, run with its interpreter.  Only the
standard library is used here; the comparison itself is the package ``benchmarks.comparison``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
PEERS = CHECKOUT / ".venv-peers"
PYTHON = PEERS / "bin" / "python"

PACKAGES = [
    "lmcache==0.5.6",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    # What LMCache imports on a machine without an accelerator and vLLM does not bring.
    "aiofile",
    "aiofiles",
    "blake3",
    "caio",
    "nvtx",
    "sortedcontainers",
]
NATIVE_LIBRARIES = {"libibverbs.so.1": "libibverbs1"}
"""Shared libraries that Mooncake loads also where there is no RDMA, with the Debian packages that bring them."""


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    if sys.argv[1:] == ["--install"]:
        return install()
    return compare(sys.argv[1:])


def compare(arguments: list[str]) -> NoReturn:
    """Become the comparison, with the interpreter that sees the peers where there is one."""
    python = PYTHON if PYTHON.exists() else Path(sys.executable)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    os.execv(python, [str(python), "-m", "benchmarks.comparison", *arguments])  # noqa: S606 - no shell is wanted


def install() -> int:
    """Make .venv-peers, or bring it up to date; 1 when something stands in the way."""
    if find_spec("vllm") is None:
        say("error: this Python has no vLLM; run make setup, and then .venv/bin/python benchmarks/peers.py --install")
        return 1
    borrowed = list(dict.fromkeys(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    if not PYTHON.exists():
        say(f"making {PEERS.name} with {sys.executable}")
        venv.EnvBuilder(with_pip=True, symlinks=True).create(PEERS)
        (PEERS / ".gitignore").write_text("*\n")
    lines = [f"import site; site.addsitedir({directory!r})" for directory in borrowed]
    site_packages = next((PEERS / "lib").glob("python3*/site-packages"))
    (site_packages / "borrowed.pth").write_text("\n".join(lines) + "\n")
    say("installing " + ", ".join(PACKAGES[:2]))
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
    if subprocess.run(pip, check=False).returncode:
        say("error: pip could not install the peers; its own message says why")
        return 1
    return install_native_libraries()


def install_native_libraries() -> int:
    packages = [package for library, package in NATIVE_LIBRARIES.items() if not loads(library)]
    if not packages:
        return 0
    wanted = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(f"error: Mooncake needs the Debian packages {wanted}; install them to have it in the comparison")
        return 1
    say(f"installing the Debian packages {wanted}")
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            last = (outcome.stderr.strip().splitlines() or ["no reason given"])[-1]
            say(f"error: {' '.join(command)} failed: {last}")
            return 1
    return 0


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
