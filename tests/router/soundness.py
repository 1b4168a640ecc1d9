"""What must hold in a fleet at any time."""

from __future__ import annotations

from ems.router.fleet import Fleet


def unsound(fleet: Fleet) -> list[str]:
    """What does not hold; empty for a sound fleet."""
    wrong = []
    for instance in (*fleet._everyone(), *fleet._leaving.values()):
        if min(instance.load, instance.queued, instance.running) < 0:
            wrong.append(f"{instance!r} has a negative load")
        if not instance.running and (instance.load or instance.queued):
            wrong.append(f"{instance!r} is loaded and runs nothing")
        listed = fleet._listed[instance.role].get(instance.address) is instance
        if listed == instance.draining:
            wrong.append(f"{instance!r} is listed and leaving at once, or neither")
    wrong.extend(f"{one!r} has left and is still known" for one in fleet._leaving.values() if not one.running)
    return wrong
