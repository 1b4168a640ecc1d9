"""What ``--tier`` means, and the one sentence for what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.config import parse_duration
from ems.errors import ConfigError
from ems.pool.tiers.settings import TierConfig, parse_tier


def test_a_folder_with_settings() -> None:
    config = parse_tier("dir:/var/cache/ems?size=100GB&ttl=7d&sync=true&compress=zstd&key=/etc/ems.key")
    assert config == TierConfig(
        kind="dir",
        place="/var/cache/ems",
        size=100 << 30,
        ttl=7 * 86400.0,
        sync=True,
        compress="zstd",
        key=Path("/etc/ems.key"),
    )
    assert config.name == "dir:/var/cache/ems"


def test_a_bucket_with_settings() -> None:
    config = parse_tier("s3://bucket/some/prefix/?endpoint=http://127.0.0.1:9000&region=eu-1&style=virtual")
    assert config.place == "bucket/some/prefix"
    assert config.endpoint == "http://127.0.0.1:9000"
    assert config.name == "s3://bucket/some/prefix"
    assert config.refresh_seconds > parse_tier("dir:/x").refresh_seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("/var/cache", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("dir:", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("dir://host/x", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("s3:", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("s3://[", "no address"),
        ("mooncake:?copy_ahead=always", "copy_ahead of a tier is 'always', expected never, on_save or on_second_use"),
        ("mooncake:?copy_ahead=on_save&write=on_second_use", "has not got yet; give write=on_save or copy_ahead=never"),
        ("mooncake:?copy_ahead=on_second_use&write=on_evict", "give write=on_second_use"),
        ("dir:/x?copy_ahead=on_save", "copy_ahead is for tiers of the kind mooncake only"),
        ("dir:/x?sise=1GB", "did you mean size"),
        ("dir:/x?size=1GB&size=2GB", "names size twice"),
        ("dir:/x?size=much", "size is 'much'"),
        ("dir:/x?ttl=soon", "ttl is 'soon'"),
        ("dir:/x?readers=many", "readers of a tier is 'many': expected `int`, got `str`"),
        ("dir:/x?readers=0", "expected 1 to 64"),
        ("dir:/x?element=3", "expected 1, 2, 4 or 8"),
        ("dir:/x?sync=maybe", "sync of a tier is 'maybe': expected `bool`, got `str`"),
        ("dir:/x?write=sometimes", "write"),
        ("dir:/x?endpoint=http://h", "for tiers of the kind s3 only"),
        ("s3://b?sync=true", "for tiers of the kind dir only"),
        ("s3://b?endpoint=h:1", "expected an address such as"),
        ("dir:/x?batch=16MB&queue=1MB", "larger than its queue"),
        ("dir:/x?batch=2GB&queue=4GB", "at most"),
        ("dir:/x?timeout=0", "expected a positive time"),
        ("mooncake:?seal_key=", "seal_key of a tier names no file"),
        ("dir:/x?key", "key of a tier names no file"),
        ("dir:/x?bogus=1", "a tier of the kind dir has no setting 'bogus', known are size, ttl, write, sync,"),
        ("mooncake:?bogus=1", "a tier of the kind mooncake has no setting 'bogus', known are write, seal_key, queue,"),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_tier(text)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ("", True),
        ("?write=on_second_use", True),
        ("?write=on_evict", False),
        ("?write=never", True),
        ("?copy_ahead=never", False),
        ("?copy_ahead=on_save", True),
    ],
)
def test_hosts_copy_ahead_where_the_cluster_has_what_they_tell_of(settings: str, copies: bool) -> None:
    assert parse_tier(f"mooncake:{settings}").copies_ahead is copies


@given(st.text(max_size=60))
def test_any_text_is_a_tier_or_a_sentence(text: str) -> None:
    for one in (text, f"dir:/x?{text}", f"s3://b/{text}"):
        try:
            tier = parse_tier(one)
        except ConfigError:
            continue
        assert tier.kind in ("dir", "s3")
        assert tier.place


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("1.5s", 1.5), ("2m", 120), ("3h", 10800), ("1w", 604800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
