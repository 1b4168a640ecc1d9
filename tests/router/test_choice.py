from __future__ import annotations

from ems.router.config import Address
from ems.router.fleet import Fleet, Instance, Role, pick


def three() -> tuple[Fleet, Instance, Instance, Instance]:
    fleet = Fleet()
    for port in (1, 2, 3):
        fleet.add(Role.DECODE, Address("h", port), 0.0, trusted=True)
    one, two, other = fleet.listed(Role.DECODE)
    return fleet, one, two, other


def test_the_least_loaded_is_chosen() -> None:
    fleet, one, two, other = three()
    fleet.hold(one, 10)
    fleet.hold(two, 5)
    fleet.hold(other, 7)

    assert two is pick(fleet.usable(Role.DECODE))


def test_equal_loads_go_round() -> None:
    fleet, *instances = three()
    chosen = []
    for _ in range(6):
        instance = pick(fleet.usable(Role.DECODE))
        assert instance is not None
        fleet.hold(instance, 5).release()
        chosen.append(instance)

    assert [*instances, *instances] == chosen


def test_doubt_weighs_more_than_load() -> None:
    fleet, one, two, other = three()
    fleet.suspect(one, 0.0)
    fleet.suspect(two, 0.0)
    fleet.hold(other, 1000)

    assert other is pick(fleet.usable(Role.DECODE))


def test_tried_instances_are_chosen_last_and_only_if_allowed() -> None:
    fleet, one, two, other = three()
    fleet.hold(other, 1000)
    usable = fleet.usable(Role.DECODE)

    assert other is pick(usable, [one, two])
    assert pick(usable, usable) is None
    assert one is pick(usable, usable, again=True)
    assert pick([]) is None
    assert pick([], again=True) is None
