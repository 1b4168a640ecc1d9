"""Times of steps, one after the other and overlapping."""

from __future__ import annotations

from ems.vllm.cost import StepTimes


def test_a_step_takes_from_its_beginning_to_its_end() -> None:
    steps = StepTimes()
    steps.began(1000, 1000, 5.0)

    assert steps.ended(5.5) == (1000, 0.5)
    assert steps.ended(5.6) is None


def test_a_step_that_began_early_takes_from_the_end_of_the_one_before() -> None:
    steps = StepTimes()
    steps.began(100, 100, 0.0)
    steps.began(200, 200, 0.1)

    assert steps.ended(1.0) == (100, 1.0)
    steps.began(300, 300, 1.1)
    assert steps.ended(3.0) == (200, 2.0)
    assert steps.ended(6.0) == (300, 3.0)


def test_a_step_without_a_prompt_tells_nothing_and_keeps_its_place() -> None:
    steps = StepTimes()
    steps.began(25, 1, 0.0)
    steps.began(64, 64, 0.0)

    assert steps.ended(1.0) is None
    assert steps.ended(2.0) == (64, 1.0)


def test_steps_that_never_end_do_not_pair_for_ever() -> None:
    steps = StepTimes()
    for number in range(33):
        steps.began(1000 + number, 1000, float(number))

    assert steps.ended(33.0) == (1032, 1.0)
