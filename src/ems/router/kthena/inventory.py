"""Which pods are instances of a model server, in which role and group.  Pure functions.

Labels are compared for equality, within the server's namespace.  With a ``pdGroup`` a pod that has the labels of both
sides decodes, one that has neither is no instance, and the value of the label ``groupKey`` names its group; without one
every pod does the whole work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ems.router.config import Address
from ems.router.fleet import Role
from ems.router.kthena.objects import Labels, ModelServer, Pod


class Place(NamedTuple):
    """An instance as it should be."""

    role: Role
    address: Address
    group: str


def places(server: ModelServer, pods: Iterable[Pod]) -> Iterator[Place]:
    """Yield the instances of ``server``, in the order of ``pods``.

    :raises ConfigError: a pod's address is none.
    """
    selector, port = server.spec.workload_selector, server.spec.workload_port.port
    for pod in pods:
        labels = pod.metadata.labels
        if pod.metadata.namespace != server.metadata.namespace or not pod.serves:
            continue
        if not _has(labels, selector.match_labels):
            continue
        group = selector.pd_group
        address = Address.of(pod.status.pod_ip, port)
        if group is None:
            yield Place(Role.DECODE, address, "")
        elif _has(labels, group.decode_labels):
            yield Place(Role.DECODE, address, labels.get(group.group_key, ""))
        elif _has(labels, group.prefill_labels):
            yield Place(Role.PREFILL, address, labels.get(group.group_key, ""))


def _has(labels: Labels, wanted: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())
