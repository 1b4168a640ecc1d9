import pytest

from ems.bench.ttft_report import Outcome, Pass, Plan, Report, changes, evaluate, parse_token_ids, table
from ems.errors import ConfigError


def outcomes(*pairs: tuple[float, str] | None) -> list[Outcome | None]:
    return [pair and Outcome(first_token=pair[0], text=pair[1]) for pair in pairs]


def one_pass(name: str, *pairs: tuple[float, str] | None) -> Pass:
    return Pass(name=name, url="http://server", seconds=1.0, outcomes=outcomes(*pairs))


def test_prompts_follow_from_seed_and_name() -> None:
    plan = Plan(requests=3, input_tokens=50, seed=7)

    assert plan.prompts("A") == plan.prompts("A")
    assert plan.prompts("A") != plan.prompts("B")
    assert plan.prompts("A") != Plan(requests=3, input_tokens=50, seed=8).prompts("A")


def test_prompts_have_the_asked_shape_and_stay_within_the_ids() -> None:
    prompts = Plan(requests=5, input_tokens=200, first_token_id=10, last_token_id=12).prompts("A")

    assert [len(prompt) for prompt in prompts] == [200] * 5
    assert {token for prompt in prompts for token in prompt} == {10, 11, 12}


def test_prompts_share_no_first_tokens() -> None:
    """Two prompts with a common beginning would hit each other's blocks."""
    beginnings = [tuple(prompt[:16]) for prompt in Plan(requests=100).prompts("A")]

    assert len(set(beginnings)) == 100


def test_ratios_and_texts() -> None:
    steps = evaluate(
        [
            one_pass("1", (2.0, "x"), (4.0, "y")),
            one_pass("2", (0.2, "x"), (0.4, "other")),
            one_pass("3", (1.0, "x"), None),
        ]
    )

    assert [step.ratio for step in steps] == [1.0, pytest.approx(10.0), pytest.approx(3.0)]
    assert [step.same_text for step in steps] == [2, 1, 1]
    assert [step.failed for step in steps] == [0, 0, 1]


def test_a_prompt_that_failed_in_step_one_has_no_text_to_agree_with() -> None:
    first, second = evaluate([one_pass("1", None, (1.0, "y")), one_pass("2", (1.0, "x"), (1.0, "y"))])

    assert (first.same_text, first.failed) == (1, 1)
    assert (second.same_text, second.failed) == (1, 0)


def test_changes_only_of_figures_that_both_know() -> None:
    assert changes({"hits": 2.0, "gone": 1.0}, {"hits": 5.0, "new": 9.0}) == {"hits": 3.0}


def test_table_fits_a_terminal_and_says_all() -> None:
    steps = evaluate([one_pass("1  A to server 1, cold", (2.0, "x")), one_pass("2  A to server 1 again", (0.1, "x"))])
    lines = list(table(Report(model="m", plan=Plan(requests=1), steps=steps, pool={"keys_hit": 8.0})).lines(80))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80

    row = next(line for line in text.splitlines() if "again" in line)
    assert row.split()[-6:] == ["100", "100", "100", "20.0", "1/1", "0"]
    assert "pool meanwhile: keys_hit +8" in text
    assert "2,000" in text
    assert "…" not in text


@pytest.mark.parametrize("name", ["requests", "concurrency", "input_tokens", "output_tokens"])
def test_nothing_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0, expected 1 or more"):
        Plan(**{name: 0})


@pytest.mark.parametrize("text", ["", "5", "a-b", "9-", "-9", "1-2-3"])
def test_token_ids_that_are_no_range(text: str) -> None:
    with pytest.raises(ConfigError, match="expected FIRST-LAST"):
        parse_token_ids(text)


def test_token_ids_the_wrong_way_round() -> None:
    first, last = parse_token_ids("9-3")
    with pytest.raises(ConfigError, match="9-3, expected FIRST-LAST"):
        Plan(first_token_id=first, last_token_id=last)
