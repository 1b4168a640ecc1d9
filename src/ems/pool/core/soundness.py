"""Does what a node hands over hold together?  Looked at before another process believes it, while clients wait.

A brain, and a fast one: :meth:`~ems.pool.core.pool_core.PoolCore.check` looks at everything and takes as long as all
the rest of a hand-over.  This looks at what a wrong byte could come from: every slot is in exactly one place, of the
generation that its segment says, in a segment of its namespace.  That pages are there once, and that what is held is
there, the brain finds while it takes them over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ems.pool.core.handover import CoreState, SegmentState
from ems.pool.segments.layout import REF_BYTES

_REF = np.dtype([("segment", "<u4"), ("slot", "<u4"), ("generation", "<u4"), ("offset", "<u8")])
_SLOT_BITS = 32

Refs = npt.NDArray[np.void]


def faults(state: CoreState) -> list[str]:
    """What does not hold, one sentence each; empty when all is well."""
    broken: list[str] = []
    out: list[Refs] = []
    for number, namespace in enumerate(state.namespaces):
        index = namespace.index
        refs = _refs(index.refs)
        if not len(index.keys) // 16 == len(index.parents) // 16 == len(refs) >= index.present:
            broken.append(f"namespace {namespace.name} does not account for all of its pages")
        broken += _foreign(refs, state.segments, number)
        out.append(refs)
    out += [_refs(b"".join(refs)) for _, refs in state.limbo.values()]
    out.append(_refs(b"".join(state.quarantined)))
    if broken:
        return broken
    used = np.concatenate(out)
    if len(used) and int(used["segment"].max()) >= len(state.segments):
        return [f"a page lies in segment {used['segment'].max()}, which does not exist"]
    slots = [used["segment"].astype(np.uint64) << np.uint64(_SLOT_BITS) | used["slot"]]
    slots += [np.frombuffer(raw, dtype="<u8") for raw in state.free.values()]
    if _twice(np.concatenate(slots)):
        broken.append("a slot is in two places")
    other = set(np.unique(used["segment"][~_of_their_generation(used, state.segments)]).tolist())
    counts = np.bincount(used["segment"], minlength=len(state.segments)).tolist()
    for number, (segment, count) in enumerate(zip(state.segments, counts, strict=True)):
        if segment.used != count:
            broken.append(f"segment {number} lost slots: {segment.used} are out, {count} are known")
        elif number in other:
            broken.append(f"a page of segment {number} is of another generation than its slot")
    return broken


def _refs(raw: bytes) -> Refs:
    return np.frombuffer(raw[: len(raw) // REF_BYTES * REF_BYTES], dtype=_REF)


def _foreign(refs: Refs, segments: Sequence[SegmentState], namespace: int) -> Iterable[str]:
    for number in np.unique(refs["segment"]).tolist():
        if number >= len(segments) or segments[number].owner != namespace:
            yield f"pages of namespace {namespace} lie in segment {number}, which is not its own"


def _twice(slots: npt.NDArray[np.uint64]) -> bool:
    ordered = np.sort(slots)
    return bool((ordered[1:] == ordered[:-1]).any())


def _of_their_generation(refs: Refs, segments: Sequence[SegmentState]) -> npt.NDArray[np.bool_]:
    """Which of ``refs`` are of the generation that their segment says of their slot; all segments at once."""
    tables = [np.frombuffer(one.generations[: len(one.generations) // 4 * 4], dtype="<u4") for one in segments]
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    generations = np.concatenate([np.zeros(1, dtype="<u4"), *tables])
    starts = 1 + np.cumsum(lengths) - lengths
    there = refs["slot"] < lengths[refs["segment"]]
    places = np.where(there, starts[refs["segment"]] + refs["slot"], 0)
    right: npt.NDArray[np.bool_] = there & (generations[places] == refs["generation"])
    return right
