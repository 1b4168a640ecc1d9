"""The root of the command: verbs, exit statuses, one line for what goes wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App

import ems.cli
from ems.cli import run
from ems.errors import ConfigError, EmsError, PoolUnavailable

VERBS = {"node", "status", "stop", "router", "proxy", "bench"}


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> type[Verb]:
    """Make `ems` an application whose only verb raises or returns what the test puts there."""

    def build(tokens: object) -> App:
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


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("pin", "ems pin [OPTIONS] NAMESPACE [KEYS...]"),
        ("unpin", "ems unpin [OPTIONS] NAMESPACE [KEYS...]"),
        ("warm", "ems warm [OPTIONS] [NAMESPACE] [KEYS...]"),
        ("resize", "ems resize [OPTIONS] [SIZE]"),
    ],
)
def test_the_usage_of_a_verb_names_its_arguments(verb: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {usage}\n")


def test_the_help_of_a_verb_is_its_whole_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clear", "--help"]) == 0
    assert "exit status 1 when some of it is still there" in " ".join(capsys.readouterr().out.split()).lower()


def test_every_verb_that_answers_answers_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {f"{group} {name}" for group, (_, verbs) in ems.cli.GROUPS.items() for name in verbs}
    for name in {*ems.cli.VERBS, *groups} - {"node", "router", "completion"}:
        assert run([*name.split(), "--help"]) == 0
        assert "--output -o" in capsys.readouterr().out, name


def test_lists_have_no_flag_that_empties_them(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {f"{group} {name}" for group, (_, verbs) in ems.cli.GROUPS.items() for name in verbs}
    for name in {*ems.cli.VERBS, *groups}:
        assert run([*name.split(), "--help"]) == 0
        assert "--empty" not in capsys.readouterr().out, name


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


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["stats"], "unknown command 'stats', did you mean status?"),
        (["bench", "tracee"], "unknown command 'tracee', did you mean trace?"),
        (["tenant", "ad"], "unknown command 'ad', did you mean add?"),
        (["nonsense"], "unknown command 'nonsense'; see ems --help"),
        (["status", "--outptu", "json"], "there is no option --outptu, did you mean --output?"),
        (["status", "-x"], "there is no option -x; see ems status --help"),
        (["status", "more"], "nothing is expected where 'more' stands, leave it out; see ems status --help"),
        (["status", "-o", "yaml"], "-o is 'yaml', expected table or json; see ems status --help"),
        (["status", "-o"], "-o has no value, give it table or json; see ems status --help"),
        (["node", "--chek"], "there is no option --chek; see ems node --help"),
        (["stop", "--timeout", "nan"], "--timeout is 'nan', expected seconds, 0 or more; see ems stop --help"),
        (["bench", "ttft"], "URL1 is missing; see ems bench ttft --help"),
        (
            ["bench", "ttft", "a", "b", "--seed", "x"],
            "--seed is 'x', expected a whole number; see ems bench ttft --help",
        ),
        (["node", "--http-port", "x"], "--http-port is 'x', expected a whole number; see ems node --help"),
        (["node", "--high-watermark", "x"], "--high-watermark is 'x', expected a number; see ems node --help"),
        (["node", "--http=maybe"], "--http is 'maybe', expected true or false; see ems node --help"),
        (["list", "--by", "x"], "--by is 'x', expected namespace, model or tenant; see ems list --help"),
        (
            ["list", "--by", "model", "--by", "tenant"],
            "--by is given more than once, give it once; see ems list --help",
        ),
    ],
)
def test_a_mistake_in_usage_is_one_sentence(
    tokens: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tokens) == 2
    assert capsys.readouterr() == ("", f"error: {sentence}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.slow
def test_shells_complete_verbs_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("resize", "older-than", "tenant"))


def test_reader_that_leaves_early() -> None:
    finished = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ems.cli --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("verb", ["explain", "warm"])
def test_tokens_may_come_from_standard_input(verb: str) -> None:
    words = [verb, "--tokens", "-"]
    _, bound, _ = ems.cli.build_app(words).parse_args(words)
    assert bound.arguments["tokens"] == Path("-")
