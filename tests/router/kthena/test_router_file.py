"""Kthena's configuration file: what it means, and what a router does by it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ems.errors import ConfigError
from ems.router.admission.settings import AdmissionConfig
from ems.router.choosing.kthena import Asked, Profile
from ems.router.kthena.router_file import Schedulers
from ems.router.kthena.router_file import read as read_file
from tests.router.fakes import FakeEngine, running, until

FILE = """
scheduler:
  pluginConfig:
    - name: least-request
      args: {maxWaitingRequests: 7}
    - {name: least-latency, args: {TTFTTPOTWeightFactor: 0.25}}
    - name: prefix-cache
      args: {blockSizeToHash: 64, maxBlocksToMatch: 128}
    - {name: random, args: }
  plugins:
    Filter: {enabled: [least-request, lora-affinity], disabled: []}
    Score:
      enabled:
        - {name: least-request, weight: 2}
        - {name: gpu-usage, weight: 1}
        - {name: prefix-cache}
        - {name: random, weight: 5}
        - {name: of-my-own, weight: 1}
auth: {issuer: "https://issuer", audiences: [a], jwksUri: "https://issuer/keys"}
models:
  m2: {plugins: {Score: {enabled: [{name: random, weight: 1}]}}}
"""


def test_plugins_weights_and_arguments_are_read_as_they_stand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "routerConfiguration.yaml"
    path.write_text(FILE)
    schedulers, file = Schedulers(), read_file(path)
    schedulers.use(file)

    weights = {"least-request": 2, "gpu-usage": 1, "prefix-cache": 0}
    asked = Asked(max_waiting=7, latency_weight=0.25)
    assert schedulers.of("m") == Profile(("least-request", "lora-affinity"), weights, asked)
    assert schedulers.of("m2") == Profile((), {"random": 1})
    assert schedulers.read == {b"/metrics", b"/v1/models"}
    (said,) = (one.getMessage() for one in caplog.records)
    assert said.startswith("The score of-my-own is unknown and left out: known are gpu-usage, ")
    tokens = file.admitted(AdmissionConfig()).tokens
    assert tokens is not None
    assert (tokens.issuer, tokens.audiences, tokens.key_set) == ("https://issuer", ("a",), "https://issuer/keys")


def test_a_second_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"scheduler: {{}}\n---\n{FILE}")
    with pytest.raises(ConfigError, match="has 2 YAML documents: expected one"):
        read_file(path)


def test_without_a_scheduler_the_routers_own_way_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("")
    schedulers = Schedulers()
    schedulers.use(read_file(path))

    assert schedulers.of("m") is None
    assert not schedulers.read


@pytest.mark.parametrize(
    ("scores", "read"),
    [
        ("{name: gpu-usage, weight: 1}", {b"/metrics"}),
        ("{name: least-request, weight: 1}", {b"/metrics"}),
        ("{name: gpu-usage}, {name: prefix-cache, weight: 1}, {name: kvcache-aware, weight: 1}", set()),
    ],
)
def test_engines_are_read_when_a_plugin_that_counts_goes_by_them(tmp_path: Path, scores: str, read: set[bytes]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"models: {{m: {{plugins: {{Score: {{enabled: [{scores}]}}}}}}}}")
    schedulers = Schedulers()
    schedulers.use(read_file(path))

    assert schedulers.read == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scheduler: {plugins: {filter: {}}}", "unknown field `filter` - at `$.scheduler.plugins`"),
        ("scheduler: {plugins: {Score: {enabled: [{weight: 1}]}}}", "missing required field `name`"),
        ("scheduler: {pluginConfig: [{name: least-request, args: {maxWaitingRequests: -1}}]}", "Expected `int` >= 0"),
        (
            "scheduler: {pluginConfig: [{name: least-latency, args: {TTFTTPOTWeightFactor: 2}}]}",
            "Expected `float` <= 1",
        ),
        ("schedular: {}", "unknown field `schedular`"),
        ("- 1", "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_in_it_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_file(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


async def test_a_router_goes_by_the_file_and_by_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ems.files.POLL_SECONDS", 0.01)
    caplog.set_level(logging.INFO, "ems")
    path = tmp_path / "c.yaml"
    path.write_text("scheduler: {plugins: {Score: {enabled: [{name: prefix-cache, weight: 1}]}}}")
    body = {"model": "m", "prompt": "word " * 400}
    async with (
        FakeEngine() as one,
        FakeEngine() as two,
        running(decodes=[one.address, two.address], router_file=path) as router,
    ):
        router.router.chooser._draw.seed(1)
        for _ in range(6):
            await router.post(json=body)
        assert sorted([len(one.seen), len(two.seen)]) == [0, 6]
        path.write_text("scheduler: [")
        await until(lambda: "what was read before still counts" in caplog.text)
        await router.post(json=body)
        assert sorted([len(one.seen), len(two.seen)]) == [0, 7]
        path.write_text("scheduler: {plugins: {Score: {enabled: [{name: random, weight: 1}]}}}")
        await until(lambda: f"Read {path} again" in caplog.text)
        for _ in range(40):
            await router.post(json=body)

    assert min(len(one.seen), len(two.seen)) > 5
