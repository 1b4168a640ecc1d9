#!/usr/bin/env python3
"""EMS beside the KV-cache pools that vLLM ships connectors for, and beside engines without a pool: one table.

    .venv/bin/python benchmarks/peers.py --install   once: puts LMCache into .venv-peers, an environment of its own
    .venv/bin/python benchmarks/peers.py             the comparison: 90 minutes; --help lists what can be smaller

Mooncake comes with `make setup`, for EMS uses it too.  LMCache never gets into the project's own environment:
.venv-peers borrows the engine from .venv and adds it without its dependencies, of which a CPU needs a few.  All
engines, with EMS and without, run with its interpreter.  Only the standard library is used here; the comparison itself
is the package ``benchmarks.comparison``.
"""

from __future__ import annotations

import os
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
    # What LMCache imports on a machine without an accelerator and vLLM does not bring.
    "aiofile",
    "aiofiles",
    "blake3",
    "caio",
    "nvtx",
    "sortedcontainers",
]


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
    say(f"installing {PACKAGES[0]}")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
    if subprocess.run(pip, check=False).returncode:
        say("error: pip could not install the peers; its own message says why")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
