"""The root of the command: verbs, exit statuses, one line for what goes wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cyclopts import App

import ems.cli
from ems.cli import run
from ems.errors import ConfigError, EmsError, PoolUnavailable

VERBS = {"node", "status", "stop", "router", "proxy", "bench"}


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> type[Verb]:
    """Make `ems` an application whose only verb raises or returns what the test puts there."""

    def build() -> App:
        app = App(exit_on_error=False, print_error=False, suppress_keyboard_interrupt=False)
        app.command(Verb.call, name="verb")
        return app

    monkeypatch.setattr(ems.cli, "build_app", build)
    return Verb


class Verb:
    outcome: object = None

    @staticmethod
    def call() -> object:
        if isinstance(Verb.outcome, BaseException):
            raise Verb.outcome
        return Verb.outcome


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)


def test_every_verb_can_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    for name in [["node"], ["status"], ["stop"], ["router"], ["proxy"], ["bench", "pool"], ["bench", "ttft"]]:
        assert run([*name, "--help"]) == 0
        assert "Usage: ems" in capsys.readouterr().out


def test_help_imports_no_verb() -> None:
    program = "import sys; from ems.cli import run; run(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    for module in ("ems.cli.router", "ems.cli.node", "ems.cli.bench", "aiohttp", "starlette", "numpy"):
        assert f"'{module}'" not in finished.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ems.__version__


@pytest.mark.parametrize(
    "tokens",
    [["nonsense"], ["bench", "nonsense"], ["bench", "ttft"], ["bench", "ttft", "a", "b", "--requests", "many"]],
    ids=" ".join,
)
def test_usage_errors(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tokens) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("error") == 1
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("--size is odd."), 2), (PoolUnavailable("no node answers"), 1), (EmsError("two\n  lines"), 1)],
    ids=["setting", "pool", "lines"],
)
def test_errors_are_one_line(
    verb: type[Verb], error: EmsError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.outcome = error

    assert run(["verb"]) == status
    shown = capsys.readouterr().err
    assert shown == "error: " + " ".join(str(error).split()).rstrip(".") + "\n"


def test_interrupt_says_nothing(verb: type[Verb], capsys: pytest.CaptureFixture[str]) -> None:
    verb.outcome = KeyboardInterrupt()

    assert run(["verb"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("outcome", "status"), [(None, 0), (0, 0), (3, 3), (True, 0)])
def test_a_verb_may_return_its_status(verb: type[Verb], outcome: object, status: int) -> None:
    verb.outcome = outcome

    assert run(["verb"]) == status


def test_a_defect_keeps_its_trace(verb: type[Verb]) -> None:
    verb.outcome = ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        run(["verb"])


def test_reader_that_leaves_early() -> None:
    finished = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ems.cli --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "Traceback" not in finished.stderr
