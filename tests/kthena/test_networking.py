"""What is read out of Kthena's objects, and the sentence for what is wrong in one."""

from __future__ import annotations

import pytest

from ems.errors import ConfigError
from ems.kthena.networking import NETWORKING, ModelRoute, ModelServer
from ems.kthena.rate_limit import Unit
from ems.kubernetes import manifests
from ems.kubernetes.objects import Resource
from tests.router.kthena.manifests import ROUTE, SERVER, documents, read


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read({"a.yaml": text})
    return str(refused.value)


def test_defaults_are_those_of_kthena() -> None:
    [server, route] = read(
        {"a.yaml": documents(SERVER, ROUTE.replace("spec:", "spec:\n  rateLimit: {inputTokensPerUnit: 5}"))}
    ).objects

    assert isinstance(server, ModelServer)
    assert isinstance(route, ModelRoute)
    assert server.spec.workload_port.protocol == "http"
    assert server.spec.traffic_policy.seconds == 10
    assert route.spec.rules[0].target_models[0].weight == 100
    assert route.spec.rate_limit is not None
    assert (route.spec.rate_limit.input_tokens_per_unit, route.spec.rate_limit.unit) == (5, Unit.SECOND)


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("port: 7100", "port: 70000", "spec.workloadPort.port: Expected `int` <= 65535"),
        ("port: 7100", "prot: 7100", "spec.workloadPort: there is an unknown field `prot`"),
        ("inferenceEngine: vLLM", "inferenceEngine: TGI", "spec.inferenceEngine: Invalid enum value 'TGI'"),
        ("  inferenceEngine: vLLM\n", "", "spec: there is no required field `inferenceEngine`"),
        ("role: prefill", "role: 1", "spec.workloadSelector.pdGroup.prefillLabels[...]: Expected `str`, got `int`"),
        ("timeout: 10s", "timeout: 10", "spec.trafficPolicy.timeout: Expected `str | null`, got `int`"),
        ("timeout: 10s", "timeout: soon", "spec.trafficPolicy: 'soon' is no duration: expected one such as 10s"),
        ("timeout: 10s", "timeout: 0s", "spec.trafficPolicy: timeout is 0"),
        ("timeout: 10s", "retry: {retryInterval: 1}", "spec.trafficPolicy.retry.retryInterval: Expected `str`"),
        ("type: nixl", "type: sglang", "spec.kvConnector.type: Invalid enum value 'sglang'"),
        ("name: kimi-k25-pd\n", "name: Kimi\n", "ModelServer Kimi: metadata.name: Expected `str` matching regex"),
    ],
)
def test_what_is_wrong_in_a_model_server_is_named(written: str, instead: str, said: str) -> None:
    assert written in SERVER
    message = refusal(SERVER.replace(written, instead, 1))

    assert message.startswith("a.yaml: ModelServer ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("  modelName: kimi-k25\n", "", "spec: a ModelRoute needs modelName, loraAdapters or both"),
        ("  modelName: kimi-k25\n", "  loraAdapters: ['']\n", "spec.loraAdapters[0]: Expected `str` of length >= 1"),
        ("- name: default", "- modelMatch: {uri: {}}", "a match needs exact, prefix or regex"),
        ("- name: default", "- modelMatch: {uri: {regex: '(?=a)'}}", "is no regular expression of RE2"),
        ("- name: default", "- modelMatch: {url: {exact: a}}", "modelMatch: there is an unknown field `url`"),
        ("kimi-k25-pd\n", "kimi-k25-pd\n          weight: 101\n", "targetModels[0].weight: Expected `int` <= 100"),
        ("kimi-k25-pd\n", "kimi-k25-pd\n          weight: 0\n", "spec.rules[0]: the weights of targetModels are all 0"),
        ("modelServerName: kimi-k25-pd", "weight: 3", "a target needs either modelServerName or"),
        ("  rules:", "  rateLimit: {unit: week}\n  rules:", "spec.rateLimit.unit: Invalid enum value 'week'"),
    ],
)
def test_what_is_wrong_in_a_model_route_is_named(written: str, instead: str, said: str) -> None:
    assert written in ROUTE
    message = refusal(ROUTE.replace(written, instead, 1))

    assert message.startswith("a.yaml: ModelRoute kimi-k25: ")
    assert said in message


def test_a_target_may_be_an_external_provider_which_the_router_refuses() -> None:
    text = ROUTE.replace("modelServerName", "externalModelProviderName")
    routes = Resource("modelroutes", NETWORKING, "ModelRoute", ModelRoute)
    [route] = manifests.read({"a.yaml": text}, [routes]).objects

    assert isinstance(route, ModelRoute)
    assert route.spec.rules[0].target_models[0].external_model_provider_name == "kimi-k25-pd"
    assert "this router serves no external providers" in refusal(text)
