"""The table over the releases of vLLM says what the tests said, and nothing passes that did not run."""

from __future__ import annotations

from scripts.matrix import Outcome, read_report, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.vllm.test_model" name="a" time="1.5"/>
<testcase classname="tests.vllm.test_pages" name="b[x]" time="2"><failure message="no"/></testcase>
<testcase classname="tests.vllm.test_pages" name="c" time="0"><skipped message="later"/></testcase>
<testcase classname="tests.e2e.test_handoff" name="d" time="30"/>
<testcase classname="" name="tests.e2e.test_modes" time="0"><error message="cannot be imported"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_in_the_column_of_their_module() -> None:
    outcomes = read_report(REPORT, ["connector", "hand-off", "modes"])

    assert outcomes == {
        "connector": Outcome(1, 1, 1, 3.5),
        "hand-off": Outcome(1, 0, 0, 30.0),
        "modes": Outcome(0, 1, 0, 0.0),
    }


def test_a_suite_that_did_not_run_has_failed() -> None:
    assert read_report(REPORT, ["one pool"]) == {"one pool": Outcome(failed=1)}
    assert read_report("<testsuites/>", ["connector"]) == {"connector": Outcome(failed=1)}


def test_the_table_has_a_line_for_each_release() -> None:
    text = table({"0.28.0": {"connector": Outcome(3, 0, 1, 2.4)}, "0.30.0": {"connector": Outcome(0, 2, 0, 61)}})

    assert text.splitlines() == [
        "vLLM    connector",
        "------  " + "-" * 25,
        "0.28.0  3 passed, 1 skipped (2 s)",
        "0.30.0  2 failed (61 s)",
    ]
