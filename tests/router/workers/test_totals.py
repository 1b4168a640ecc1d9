"""Pages of metrics are added up as they should be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ems.http.address import Address
from ems.router.fleet import Fleet, Role
from ems.router.metrics import Counters, RouterCollector
from ems.router.workers.totals import summed


def page(answered: dict[tuple[str, int], int], seconds: list[float], *, up: bool = True) -> bytes:
    counters, fleet = Counters(), Fleet()
    counters.answered.update(answered)
    for one in seconds:
        counters.first_byte.observe(one)
    fleet.add(Role.DECODE, Address("h", 1), 0.0, trusted=up)
    fleet.hold(fleet.listed(Role.DECODE)[0], 5)
    return generate_latest(RouterCollector(fleet, counters))


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
    }


ANSWERED = st.dictionaries(
    st.tuples(st.sampled_from(["/a", '/"\\ b', "/\r\n\x85"]), st.sampled_from([200, 503])), st.integers(0, 9)
)


@given(st.lists(st.tuples(ANSWERED, st.lists(st.floats(0.001, 1000), max_size=3)), min_size=1, max_size=4))
def test_a_sum_is_that_of_each_sample(parts: list[tuple[dict[tuple[str, int], int], list[float]]]) -> None:
    pages = [page(*one) for one in parts]
    total: dict[object, float] = {}
    for one in pages:
        for name, value in samples(one).items():
            total[name] = total.get(name, 0.0) + value

    joined = samples(summed(pages))

    assert joined.keys() == total.keys()
    for name, value in joined.items():
        same = name[0] in {"ems_build_info", "ems_router_instance_up", "ems_router_instances_leaving"}
        assert abs(value - (total[name] / len(pages) if same else total[name])) < 1e-6 * max(1.0, value)


def test_one_page_stays_as_it_is() -> None:
    alone = page({("/a", 200): 3}, [0.1])

    assert summed([alone]) == alone


def test_an_instance_is_up_where_any_worker_may_use_it() -> None:
    joined = samples(summed([page({}, [], up=False), page({}, [])]))

    assert joined["ems_router_instance_up", (("instance", "h:1"), ("role", "decode"))] == 1.0
