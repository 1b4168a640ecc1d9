"""Manifests to test with, in the way in which people write them."""

from __future__ import annotations

from ems.kubernetes import manifests
from ems.kubernetes.manifests import Manifests
from ems.router.kthena.objects import RESOURCES

SERVER = """
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata:
  name: kimi-k25-pd
  namespace: dev
spec:
  model: kimi_k25
  inferenceEngine: vLLM
  workloadSelector:
    matchLabels:
      modelserving.volcano.sh/name: kimi-k25-pd
    pdGroup:
      groupKey: modelserving.volcano.sh/group-name
      prefillLabels:
        modelserving.volcano.sh/role: prefill
      decodeLabels:
        modelserving.volcano.sh/role: decode
  workloadPort:
    port: 7100
  kvConnector:
    type: nixl
  trafficPolicy:
    timeout: 10s
"""

SGLANG = SERVER.replace("vLLM", "SGLang").replace("  kvConnector:\n    type: nixl\n", "")

ROUTE = """
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata:
  name: kimi-k25
  namespace: dev
spec:
  modelName: kimi-k25
  rules:
    - name: default
      targetModels:
        - modelServerName: kimi-k25-pd
"""

SERVING = """
apiVersion: workload.serving.volcano.sh/v1alpha1
kind: ModelServing
metadata: {name: kimi-k25-pd, namespace: dev}
spec:
  replicas: 1
  recoveryPolicy: ServingGroupRecreate
"""


def pod(
    name: str, role: str, port: int, *, ip: str = "127.0.0.1", group: str = "kimi-k25-pd-0", status: str = ""
) -> str:
    return f"""
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: dev
  labels:
    modelserving.volcano.sh/name: kimi-k25-pd
    modelserving.volcano.sh/group-name: {group}
    modelserving.volcano.sh/role: {role}
  annotations: {{ems.router/port: "{port}"}}
spec: {{nodeName: node-1, containers: []}}
status:
  podIP: {ip}
{status}
"""


def documents(*texts: str) -> str:
    return "\n---\n".join(texts)


def read(texts: dict[str, str]) -> Manifests:
    return manifests.read(texts, RESOURCES)
