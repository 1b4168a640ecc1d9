"""What `import ems` promises: these names, found when used, at hardly any cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import ems

NAMES = {"CcConfig_v1", "CcKvOption", "Ems", "EmsConfig", "EmsErrorCode", "EmsException", "__version__"}

PROBE = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(statement: str) -> set[str]:
    """Run a statement in a new interpreter; return the packages that it brought, without Python's own."""
    program = PROBE.format(statement=statement)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    packages = {name.partition(".")[0] for name in json.loads(finished.stdout)}
    return {package for package in packages - sys.stdlib_module_names if not package.startswith("_")}


def test_nothing_is_imported_before_it_is_used() -> None:
    program = "import sys, ems; print([name for name in sys.modules if name.startswith('ems.')])"

    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


def test_names() -> None:
    assert set(ems.__all__) == NAMES
    assert set(dir(ems)) >= NAMES
    for name in NAMES:
        assert getattr(ems, name) is not None


def test_classes_are_the_ones_of_their_modules() -> None:
    from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
    from ems.cc_v1.ems import Ems

    assert ems.Ems is Ems
    assert ems.CcConfig_v1 is CcConfig_v1
    assert {"MHA", "MLA"} <= set(KVCacheType.__members__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'ems' has no attribute 'Emss'"):
        _ = ems.Emss


@pytest.mark.parametrize(
    ("statement", "others"),
    [("import ems", "pass"), ("from ems import " + ", ".join(sorted(NAMES)), "import msgspec, numpy")],
    ids=["import ems", "its names"],
)
def test_import_is_light(statement: str, others: str) -> None:
    """Packages of others are most of what it costs; benchmarks/start.py measures that."""
    assert imported(statement) == {"ems"} | imported(others)
