"""Tables: on a terminal of any width and into a pipe nothing of them is cut."""

from __future__ import annotations

import pytest

from ems.cli.shown import print_facts, print_tables, table

NAME = "tenant/" + "organisation/a-model-with-a-long-name" * 3 + "/0123456789abcdef0123456789abcdef/0.0"
COLUMNS = ("NAMESPACE", "PAGES", "WRITING", "LEASES", "PINNED", "BYTES", "IDLE", "dir")
ROW = (NAME, "123456", "12", "3", "0", "463.2 GiB", "12s", "99 (1.4 GiB)")
OTHER = ("short/name", "1", "0", "0", "0", "4.0 KiB", "2d", "0")


def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None, *rows: tuple[str, ...]
) -> list[str]:
    monkeypatch.setattr("sys.stdout.isatty", lambda: columns is not None, raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    print_tables(table(COLUMNS, rows))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_narrow_terminal_shows_every_name_and_every_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    lines = shown(capsys, monkeypatch, columns, ROW, OTHER)
    assert lines[0::2] == ["NAMESPACE", NAME, OTHER[0]]
    assert all(len(line) <= columns for line in lines[1::2])
    assert [line.split() for line in lines[1::2]] == [
        " ".join(row).split() for row in (COLUMNS[1:], ROW[1:], OTHER[1:])
    ]
    assert "..." not in "".join(lines)


def test_a_sentence_in_the_last_column_is_folded_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("ok", "ports", "free: 9410"), ("ERROR", "memory", "21 GiB are free, 64 GiB are wanted: give less")]
    print_tables(table(("", "CHECK", "FINDING"), rows))
    assert capsys.readouterr().out.splitlines() == [
        "       CHECK   FINDING",
        "ok     ports   free: 9410",
        "ERROR  memory  21 GiB are free, 64 GiB",
        "               are wanted: give less",
    ]


def test_what_fits_is_one_line_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(capsys, monkeypatch, 80, OTHER)
    assert len(lines) == 2
    assert lines[1].split() == " ".join(OTHER).split()


def test_a_pipe_gets_one_whole_line_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(capsys, monkeypatch, None, ROW, OTHER)
    assert [line.split()[0] for line in lines] == ["NAMESPACE", NAME, OTHER[0]]


def test_a_fact_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("model", "a"), ("namespace", "")])
    assert capsys.readouterr().out.split() == ["model", "a", "namespace"]
