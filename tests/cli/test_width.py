"""What every verb says fits a terminal of 80 columns, and one of 40; only what cannot be broken is longer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ems import cli
from ems.cli import run
from ems.pool.client.answers import Namespace
from tests.kit.node import NodeProcess

MODEL = "organisation/a-model-with-a-name-that-is-longer-than-most-of-them"
NAMES = (f"{MODEL}/0123456789abcdef0123456789abcdef/0.0", "short/0123456789abcdef0123456789abcdef/0.0")
KEYS = [bytes([number] * 16) for number in range(1, 4)]
CALLS = [
    "status",
    "list",
    "list --by model",
    "list --by tenant",
    "health",
    "show {name}",
    f"show {KEYS[0].hex()}",
    f"show {'f' * 32}",
    f"explain --key {KEYS[0].hex()}",
    f"pin {{name}} {KEYS[0].hex()}",
    "unpin {name}",
    "warm {name}",
    "warm --tenant default --limit 1MB",
    "resize 16MB --dry-run",
    "resize --cancel",
    "drain --dry-run",
    "clear --older-than 1h",
    "clear --all --dry-run",
    "clear --model nothing-is-called-so",
    "tenant add somebody-with-a-name --minimum 25% --cap 50%",
    "tenant set somebody-with-a-name --cap 75%",
    "tenant list",
    "key add somebody-with-a-name --ttl 12h",
    "key rotate somebody-with-a-name",
    "key list somebody-with-a-name",
    "tenant show somebody-with-a-name",
    "key revoke somebody-with-a-name all --dry-run",
    "tenant remove somebody-with-a-name",
    "fsck dir:{tier}",
    "bench trace made:loop --requests 40 --capacity 20,40 --look-ahead 4 --tier 10",
    "status --outptu json",
    "status --socket /nonexistent/node.sock",
    "node --size lots",
    "node --tenants /nonexistent --socket-mode 666 --high-watermark 2",
    "router --prefiller-hosts one two --prefiller-ports 1",
]
VERBS = [*cli.VERBS, *(f"{group} {verb}" for group, (_, verbs) in cli.GROUPS.items() for verb in verbs)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    tier = tmp_path_factory.mktemp("tier")
    with NodeProcess("--size", "8MB", "--tier", f"dir:{tier}") as running:
        running.wait_touched()
        client = running.client()
        for name in NAMES:
            client.commit(client.reserve(Namespace(name, 4096), bytes(16), KEYS))
        client.lookup(Namespace(NAMES[0], 4096), KEYS[0] + bytes(16))
        yield running
        client.close()


@pytest.fixture
def at(node: NodeProcess, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))
    monkeypatch.setenv("EMS_TENANTS", str(tmp_path_factory.getbasetemp() / "tenants.json"))
    return node._flags[-1].removeprefix("dir:")


def too_long(text: str, width: int) -> list[str]:
    """Lines that are longer than ``width`` although they could be broken."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    lines = [line for line in plain.splitlines() if len(line) > width]
    return [line for line in lines if len(line.split()) > 1]


@pytest.mark.process
@pytest.mark.parametrize("width", [80, 40])
def test_what_verbs_say_fits(
    width: int, node: NodeProcess, at: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    wrong = {}
    for call in CALLS:
        status = run(call.format(name=NAMES[0], tier=at).split())
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert out or err or status
        if found := too_long(out + err, width):
            wrong[call] = found
    assert not wrong, "\n".join(line for lines in wrong.values() for line in lines)


@pytest.mark.parametrize("width", [80, 40])
def test_help_fits(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for verb in ("", *VERBS, *cli.GROUPS):
        assert run([*verb.split(), "--help"]) == 0
        out, err = capsys.readouterr()
        assert not [line for line in out.splitlines() if len(line) > width], verb
        assert not err
