"""Manifests: what is read, and the one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.router.kthena.manifests import read
from ems.router.kthena.objects import seconds
from tests.router.kthena.manifests import GROUP, pod, route, server, write


def test_a_folder_of_documents_and_lists_is_read_and_others_are_passed_over(tmp_path: Path) -> None:
    write(
        tmp_path / "one.yaml", server(), route(), {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    )
    write(
        tmp_path / "two.yml",
        {"apiVersion": "v1", "kind": "List", "items": [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]},
    )
    (tmp_path / "notes.txt").write_text("{")

    found = read(tmp_path)

    assert list(found.servers) == ["default/pair"]
    assert list(found.routes) == ["default/asked"]
    assert list(found.pods) == ["default/a", "default/b"]
    assert found.passed_over == 1
    assert found.servers["default/pair"].spec.traffic_policy.timeout is None
    assert found.routes["default/asked"].spec.rules[0].target_models[0].weight == 100


def changed(made: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**made, "spec": {**made["spec"], **spec}}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed(server(), surprise=1), "the ModelServer pair is wrong: Object contains unknown field `surprise`"),
        (changed(server(), inferenceEngine="TGI"), "Invalid enum value 'TGI' - at `$.spec.inferenceEngine`"),
        (changed(server(), workloadPort={"port": 0}), "`int` >= 1 - at `$.spec.workloadPort.port`"),
        (changed(server(), workloadSelector={"matchLabels": {}}), "`$.spec.workloadSelector.matchLabels`"),
        (changed(server(), trafficPolicy={"timeout": "soon"}), "is 'soon', expected a duration such as 10s"),
        (changed(server(), trafficPolicy={"retry": {"retryInterval": "1"}}), "retryInterval is '1'"),
        (changed(server(), workloadPort={"port": 1, "protocol": "https"}), "expected http"),
        (changed(route(), modelName=""), "spec.modelName is empty"),
        (changed(route(), rules=[]), "`$.spec.rules`"),
        (changed(route(), rules=[{"targetModels": [{"modelServerName": "a", "weight": 0}]}]), "are all 0"),
        (changed(route(), rules=[{"targetModels": [{"weight": 1}]}]), "a target needs modelServerName"),
        (
            changed(route(), rules=[{"targetModels": [{"externalModelProviderName": "o"}]}]),
            "externalModelProviderName is not served here",
        ),
        (
            changed(
                route(), rules=[{"modelMatch": {"uri": {"regex": "("}}, "targetModels": [{"modelServerName": "a"}]}]
            ),
            "the regular expression '(' is wrong",
        ),
        ({"apiVersion": GROUP, "kind": "ModelServer", "metadata": {"name": ""}, "spec": {}}, "`$.metadata.name`"),
        ({"apiVersion": GROUP, "kind": "ModelRoute"}, "the ModelRoute ? is wrong"),
        ({"kind": "List", "items": ["text"]}, "is no object"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(tmp_path: Path, document: dict[str, Any], said: str) -> None:
    file = write(tmp_path / "m.yaml", {"kind": "Other"}, document)

    with pytest.raises(ConfigError) as raised:
        read(file)

    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{file}, document 2")
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there, expected a folder"):
        read(tmp_path / "nothing")
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"a\.yaml is not YAML at line 2"):
        read(tmp_path)
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        read(tmp_path)
    write(tmp_path / "a.yaml", server(), server())
    with pytest.raises(ConfigError, match="ModelServer default/pair is there twice"):
        read(tmp_path)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("!!python/object/apply:os.system [exit 1]")
    with pytest.raises(ConfigError, match="is not YAML"):
        read(tmp_path)


def test_durations() -> None:
    assert [seconds(text, "x") for text in ("1m30s", "100ms", "1.5h", "1s500ms")] == [90.0, 0.1, 5400.0, 1.5]
