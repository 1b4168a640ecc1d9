"""The metrics pages of several workers as one.  A brain.

Counters, histograms and gauges of what runs add up; of :data:`_SAME`, which all say of one thing, the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Final

from prometheus_client.utils import floatToGoString

_SAME: Final = (b"ems_build_info", b"ems_router_instance_up", b"ems_router_instances_leaving")


def summed(pages: Iterable[bytes]) -> bytes:
    """Join pages by names and labels."""
    families: dict[bytes, dict[bytes, float]] = {}
    for page in pages:
        head, values = b"", dict[bytes, float]()
        for line in BytesIO(page):  # a label may have what ends a line elsewhere
            if line.startswith(b"# HELP"):
                head = line
                continue
            if line.startswith(b"#"):
                values = families.setdefault(head + line, {})
                continue
            sample, _, text = line.rpartition(b" ")
            value = float(text)
            before = values.get(sample, 0.0)
            values[sample] = max(before, value) if sample.startswith(_SAME) else before + value
    rows = (
        head + b"".join(b"%b %b\n" % (sample, str(floatToGoString(one)).encode()) for sample, one in values.items())  # type: ignore[no-untyped-call]
        for head, values in families.items()
    )
    return b"".join(rows)
