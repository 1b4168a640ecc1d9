"""The suite that a tier has to pass, and places that fail on purpose.

A test of a tier derives from :class:`TierConformance` and says how one is opened; pytest finds the rest::

    class TestMine(TierConformance):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path): self.folder = tmp_path
        def blobs(self): return FolderBlobs(self.folder)
        def open(self, blobs): return PackTier("mine", blobs, KEYS)

The suite is ``keeping``, ``forgetting`` and ``damage``, above ``bench``, which makes pages;
``places`` has a place that is slow, hangs, lies or fails when it is told to.
"""

from tests.kit.tiers.bench import KEYS, NAMESPACE, PAGE, chain, fetch, forget, key, page
from tests.kit.tiers.damage import Damage
from tests.kit.tiers.forgetting import Forgetting
from tests.kit.tiers.keeping import Keeping
from tests.kit.tiers.places import FaultyBlobs


class TierConformance(Keeping, Forgetting, Damage):
    """The suite: each test gets an empty place."""


__all__ = ["KEYS", "NAMESPACE", "PAGE", "FaultyBlobs", "TierConformance", "chain", "fetch", "forget", "key", "page"]
