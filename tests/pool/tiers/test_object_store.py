"""An S3-compatible bucket as a tier, over HTTP: the conformance suite, and a server that cannot be trusted."""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ems.errors import ConfigError, TierFailed
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.blobs import Blobs, Gone
from ems.pool.tiers.object_store import BucketBlobs
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig
from tests.kit.tiers import KEYS, NAMESPACE, chain, fetch
from tests.pool.tiers.lying import LyingProxy, Mood, lying_proxy
from tests.pool.tiers.pack_damage import PackConformance

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the server's libraries
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A real S3 server with the bucket ``pool``."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", "/pool")
    assert connection.getresponse().status == 200
    connection.close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def config(endpoint: str, *, timeout: float = 20.0) -> TierConfig:
    """A prefix that no other test uses."""
    return TierConfig(kind="s3", place=f"pool/{next(_prefixes)}", endpoint=endpoint, timeout=timeout)


class TestBucket(PackConformance):
    @pytest.fixture(autouse=True)
    def _place(self, endpoint: str) -> None:
        self.config = config(endpoint)

    def blobs(self) -> Blobs:
        return BucketBlobs(self.config)

    def open(self, blobs: Blobs) -> PackTier:
        return PackTier("s3", blobs, KEYS)


def test_reading_beyond_the_end_reads_nothing(endpoint: str) -> None:
    blobs = BucketBlobs(config(endpoint))
    blobs.put("one", [b"abc", b"def"])
    into = memoryview(bytearray(4))
    assert blobs.read("one", 4, [into]) == 2
    assert bytes(into[:2]) == b"ef"
    assert blobs.read("one", 6, [into]) == 0
    with pytest.raises(Gone):
        blobs.read("none", 0, [into])
    blobs.delete(["one", "none"])
    assert not list(blobs.blobs())


@pytest.fixture
def proxy(endpoint: str) -> Iterator[LyingProxy]:
    """A proxy in front of the server."""
    with lying_proxy(endpoint) as running:
        yield running


@pytest.mark.parametrize(
    "mood", ["wrong bytes", "other bytes", "500", pytest.param("hang", marks=pytest.mark.slow), "cut"]
)
def test_a_server_that_lies_or_fails_never_serves_a_wrong_byte(proxy: LyingProxy, mood: Mood) -> None:
    # A machine with much else to do may stand still for a second or two; only what hangs is waited for.
    tier = PackTier("s3", BucketBlobs(config(proxy.address, timeout=2.0 if mood == "hang" else 15.0)), KEYS)
    pages = chain("a", 3)
    assert tier.store(NAMESPACE, pages) == [Outcome.DONE] * 3
    proxy.mood = mood
    begin = time.monotonic()
    for page in pages:
        with suppress(TierFailed):
            assert fetch(tier, [page.key])[0][0] is Outcome.CORRUPT
    assert time.monotonic() - begin < 20, "a time-out did not hold"
    proxy.mood = "honest"
    tier.probe()
    tier.maintain()
    assert fetch(tier, [page.key for page in pages]) == [(Outcome.DONE, bytes(page.payload)) for page in pages]


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    blobs = BucketBlobs(config("http://127.0.0.1:1", timeout=1))
    with pytest.raises(TierFailed, match=r"cannot write x: [^\n]+$"):
        blobs.put("x", [b"y"])


def test_a_wrong_endpoint_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="expected an address such as"):
        config("not an address")


def test_a_bucket_that_does_not_exist_fails(endpoint: str) -> None:
    missing = TierConfig(kind="s3", place="nobody/x", endpoint=endpoint)
    with pytest.raises((TierFailed, Gone)):
        BucketBlobs(missing).put("x", [b"y"])
