"""What `import ems` promises: these names, found when used, at hardly any cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import ems

NAMES = {"CcConfig_v1", "CcKvOption", "Ems", "EmsConfig", "EmsErrorCode", "EmsException", "__version__"}
HEAVY = {"torch", "vllm", "transformers", "starlette", "uvicorn", "aiohttp", "rich", "cyclopts", "jinja2"}

PROBE = """
import json, sys, time
start = time.process_time()
{statement}
print(json.dumps([time.process_time() - start, sorted(sys.modules)]))
"""


def probe(statement: str) -> tuple[float, set[str]]:
    """Run a statement in a new interpreter; return its CPU seconds and the modules that are there afterwards.

    CPU seconds, because the import is not to blame for what else the machine does; of one thread, because nobody
    waits for those that numpy starts.
    """
    program = PROBE.format(statement=statement)
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    finished = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, check=True)
    seconds, modules = json.loads(finished.stdout)
    return seconds, set(modules)


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
    ("statement", "most"),
    [("import ems", 0.15), ("from ems import " + ", ".join(sorted(NAMES)), 0.3)],
    ids=["import ems", "its names"],
)
def test_import_is_light(statement: str, most: float) -> None:
    """The best of five: the import is not to blame for what else the machine does meanwhile.

    The names bring msgspec and numpy, some 0.1 s on an idle core and up to twice that on a busy one.
    """
    runs = [probe(statement) for _ in range(5)]

    assert not HEAVY & runs[0][1]
    assert min(seconds for seconds, _ in runs) < most
