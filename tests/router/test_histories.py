"""Random histories of a whole router: one answer each, nothing of another, nothing left behind, nothing that hangs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ems.router.admission.gate import Gate
from ems.router.admission.limits import Taken
from ems.router.fleet import Fleet, Hold, Role
from ems.router.observe.observer import Observer
from tests.router.histories import PORTS, Ask, Change, Fate, History, Leave, Manifests, Read, Step, Turn, Wait, live

CLIENTS = st.integers(0, 2)
SECONDS = st.sampled_from([0.0, 0.013, 1.7, 16.1, 43.0])
FATES = st.builds(
    Fate,
    deed=st.sampled_from(["answer", "answer", "answer", "error", "close", "reset", "stall", "garbage"]),
    pieces=st.integers(0, 12),
    size=st.sampled_from([100_000, 130, 40, 7]),
    seconds=SECONDS,
    framing=st.sampled_from(["sized", "chunked", "until close"]),
    status=st.sampled_from([500, 503, 429, 408, 422]),
    gives_up=st.none() | st.integers(0, 3),
)
SOME_FATES = st.lists(FATES, max_size=3).map(tuple)
ASKS = st.builds(
    Ask,
    client=CLIENTS,
    tokens=st.integers(1, 5),
    fat=st.booleans(),
    stream=st.booleans(),
    hands_over=st.booleans(),
    old=st.sampled_from([False, False, False, True]),
    session=st.sampled_from(["", "a"]),
    prefill=SOME_FATES,
    decode=SOME_FATES,
)
SOME_PORTS = st.lists(st.sampled_from(PORTS), max_size=3, unique=True).map(tuple)
STEPS: st.SearchStrategy[Step] = st.one_of(
    ASKS,
    ASKS,
    ASKS,
    st.builds(Wait, SECONDS),
    st.builds(Wait, SECONDS),
    st.builds(Leave, CLIENTS, st.booleans()),
    st.builds(Read, CLIENTS, st.booleans()),
    st.builds(Turn, st.sampled_from(PORTS), st.sampled_from(["up", "down", "unreachable", "ill"])),
    st.builds(Change, st.sampled_from(PORTS), st.sampled_from(list(Role)), st.booleans()),
    st.builds(
        Manifests,
        prefills=SOME_PORTS,
        decodes=SOME_PORTS,
        server=st.sampled_from([True, True, False]),
        route=st.sampled_from([True, True, False]),
        seconds=st.sampled_from([100, 3]),
        attempts=st.integers(0, 2),
        wrong=st.sampled_from([False, False, True]),
    ),
)
HISTORIES = st.builds(
    History,
    steps=st.lists(STEPS, min_size=1, max_size=25).map(tuple),
    kthena=st.booleans(),
    max_running=st.integers(0, 2),
    limit=st.sampled_from([None, 20_000, 100]),
    retries=st.integers(0, 2),
    drain=st.sampled_from([None, None, 0.0, 5.0, 30.0]),
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Thousands of lines that nobody reads."""
    log = logging.getLogger("ems")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


ONE_DECODE = (Change(2, Role.DECODE), Change(3, Role.DECODE))
GIVEN_UP = Fate(gives_up=1)


# A client that does not take its answer, whose engine breaks off.
@example(History((Ask(fat=True, hands_over=False, decode=(Fate("reset", 1, 9000),)), Read())))
# An engine that breaks off amid the first event; another one answers.
@example(History((Ask(stream=True, decode=(Fate("reset", 1, 110),)),)))
# An engine that gives an answer up and then breaks off.
@example(History((Ask(stream=True, decode=(Fate("reset", 1, framing="until close", gives_up=1),)),)))
# An answer of which its client takes nothing more when it ends; another request comes to the same connection.
@example(History((*ONE_DECODE, Ask(fat=True, hands_over=False, decode=(Fate(seconds=0.01),)), Read(), Wait(1), Ask(1))))
# An answer that is given up; while its second prefill hangs, another request comes to the same connection.
@example(
    History(
        (
            *ONE_DECODE,
            Ask(prefill=(Fate(), Fate("stall")), decode=(GIVEN_UP,)),
            Wait(1),
            Ask(1, decode=(Fate(seconds=14.5),)),
        )
    )
)
# An answer that is given up; its second prefill hangs, and the second decode as well.
@example(History((Ask(prefill=(Fate(), Fate("stall")), decode=(GIVEN_UP, Fate("stall"))),)))
@given(HISTORIES)
def test_whatever_happens_each_request_has_its_own_answer_and_nothing_stays_behind(history: History) -> None:
    with tempfile.TemporaryDirectory() as folder:
        live(history, Path(folder))


BUSY = (
    Ask(),
    Ask(1, decode=(Fate("stall"),)),
    Wait(1),
    Leave(1),
    Ask(2, decode=(Fate("error"),)),
    Ask(0, stream=True),
    Ask(0),
    Wait(1),
)


@pytest.mark.parametrize(
    ("broken", "name"),
    [(Fleet, "release"), (Hold, "computed"), (Gate, "end"), (Taken, "give_back"), (Observer, "finished")],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_what_is_not_given_back_is_noticed(
    broken: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(BUSY, max_running=2, limit=20_000)
    live(history, tmp_path)

    monkeypatch.setattr(broken, name, lambda *_, **__: None)

    with pytest.raises(AssertionError):
        live(history, tmp_path)
