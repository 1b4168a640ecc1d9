"""The cost model in virtual time: patient without evidence, deaf to outliers, never decided for ever."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.movement.speed import FIT_SECONDS, LEAST_SAMPLES, SAMPLES, TRY_EVERY, Line, Samples
from ems.vllm.cost import LOADS_LAST_SECONDS, CostModel

TOKENS = st.integers(16, 8192)
SECONDS = st.floats(1e-5, 100, allow_nan=False)


def taught(compute: Line, load: Line, *, now: float = 0.0, step_tokens: int = 0, seed: int = 0) -> CostModel:
    """A model that saw steps and loads of many sizes, with a tenth of noise."""
    model, random = CostModel(step_tokens=step_tokens), Random(seed)
    for _ in range(SAMPLES):
        for samples, line in ((model.computed, compute), (model.loaded, load)):
            tokens = random.randrange(64, 4096)
            samples.add(tokens, line.seconds(tokens) * random.uniform(0.95, 1.05), now)
    return model


def test_a_line_is_learned_from_measurements() -> None:
    samples = Samples(None)
    for tokens in range(100, 2000, 100):
        samples.add(tokens, 0.01 + tokens * 1e-4, 0.0)
    line = samples.line(0.0)

    assert line is not None
    assert abs(line.fixed - 0.01) < 1e-6
    assert abs(line.per_unit - 1e-4) < 1e-9


def test_equal_sizes_tell_seconds_a_token() -> None:
    samples = Samples(None)
    for seconds in (0.1, 0.11, 0.09, 0.1, 7.0):
        samples.add(1000, seconds, 0.0)

    assert samples.line(0.0) == Line(0.0, 0.0001)


def test_noise_never_makes_more_work_quicker() -> None:
    samples = Samples(None)
    for tokens in range(100, 1000, 100):
        samples.add(tokens, 1 / tokens, 0.0)

    assert samples.line(0.0) == Line(1 / 500, 0.0)


def test_a_new_line_is_drawn_now_and_then_and_dropped_at_once() -> None:
    samples = Samples(10.0)
    for _ in range(SAMPLES):
        samples.add(1000, 1.0, 0.0)
    assert samples.line(0.0) == Line(0.0, 0.001)
    for _ in range(SAMPLES):
        samples.add(1000, 2.0, 0.0)

    assert samples.line(FIT_SECONDS / 2) == Line(0.0, 0.001)
    assert samples.line(FIT_SECONDS) == Line(0.0, 0.002)
    assert samples.line(11.0) is None


def test_nonsense_is_left_out() -> None:
    samples = Samples(None)
    for _ in range(LEAST_SAMPLES):
        samples.add(0, 1.0, 0.0)
        samples.add(10, 0.0, 0.0)

    assert samples.line(0.0) is None


@given(
    st.lists(st.tuples(TOKENS, SECONDS), max_size=SAMPLES),
    st.lists(st.tuples(TOKENS, SECONDS), max_size=LEAST_SAMPLES - 1),
    TOKENS,
    st.booleans(),
)
def test_without_evidence_of_both_nothing_is_refused(
    many: list[tuple[int, float]], few: list[tuple[int, float]], tokens: int, few_loads: bool
) -> None:
    model = CostModel()
    for size, seconds in few if few_loads else many:
        model.loaded.add(size, seconds, 0.0)
    for size, seconds in many if few_loads else few:
        model.computed.add(size, seconds, 0.0)

    assert model.worth_loading(tokens, 0.0)
    assert model.reluctance.refused == 0


def test_a_load_that_takes_longer_than_computing_is_refused_and_one_that_does_not_is_made() -> None:
    # Computing takes 0.1 ms a token, loading 20 ms and 0.01 ms a token: even at 222 tokens.
    model = taught(Line(0.005, 1e-4), Line(0.02, 1e-5))

    assert not model.worth_loading(100, 0.0)
    assert model.worth_loading(500, 0.0)
    assert model.reluctance.refused == 1


def test_steps_that_need_not_be_made_count_whole() -> None:
    compute, load = Line(0.01, 1e-5), Line(0.01, 1.5e-5)

    assert not taught(compute, load).worth_loading(4096, 0.0)
    assert taught(compute, load, step_tokens=512).worth_loading(4096, 0.0)


def test_switched_off_it_refuses_nothing() -> None:
    model = CostModel(enabled=False)
    for _ in range(SAMPLES):
        model.computed.add(1000, 0.001, 0.0)
        model.loaded.add(1000, 10.0, 0.0)

    assert all(model.worth_loading(1000, 0.0) for _ in range(100))


@given(st.integers(0, 1 << 30), st.lists(st.tuples(TOKENS, SECONDS), max_size=SAMPLES // 5))
def test_a_few_strange_measurements_change_no_mind(seed: int, strange: list[tuple[int, float]]) -> None:
    fast = taught(Line(0.005, 1e-4), Line(0.001, 1e-5), seed=seed)
    slow = taught(Line(0.005, 1e-4), Line(0.001, 1e-3), seed=seed)
    for tokens, seconds in strange:
        fast.loaded.add(tokens, seconds, 0.0)
        slow.loaded.add(tokens, seconds, 0.0)

    assert fast.worth_loading(1000, 0.0)
    assert not slow.worth_loading(1000, 0.0)


@given(
    st.lists(st.tuples(TOKENS, SECONDS, st.booleans()), max_size=100),
    st.lists(st.tuples(TOKENS, st.floats(0, 10)), min_size=TRY_EVERY, max_size=200),
)
def test_whatever_was_measured_a_load_is_tried_now_and_then(
    history: list[tuple[int, float, bool]], decisions: list[tuple[int, float]]
) -> None:
    model, now = CostModel(), 0.0
    for tokens, seconds, load in history:
        (model.loaded if load else model.computed).add(tokens, seconds, now)
    advised = []
    for tokens, pause in decisions:
        now += pause
        advised.append(model.worth_loading(tokens, now))

    for start in range(len(advised) - TRY_EVERY + 1):
        assert any(advised[start : start + TRY_EVERY])
    assert model.reluctance.refused == advised.count(False)


def test_a_pool_that_became_fast_is_used_again() -> None:
    """Simulated: a slow pool is refused; from second 100 on it is fast, and soon it is used for good."""
    model, now = taught(Line(0.005, 1e-4), Line(0.5, 1e-3)), 0.0
    advised: list[tuple[float, bool]] = []
    while now < 400:
        load = Line(0.5, 1e-3) if now < 100 else Line(0.001, 1e-6)
        yes = model.worth_loading(1000, now)
        advised.append((now, yes))
        if yes:
            model.loaded.add(1000, load.seconds(1000), now)
        else:
            model.computed.add(1000, 0.105, now)
        model.learn(now)
        now += 0.5

    slow = [yes for at, yes in advised if at < 100]
    assert sum(slow) < len(slow) / 5
    assert all(yes for at, yes in advised if at > 100 + LOADS_LAST_SECONDS + 20)
