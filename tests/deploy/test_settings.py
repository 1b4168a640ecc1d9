"""What manifests and units say to EMS is what EMS understands: flags, files, paths over HTTP, sizes that fit."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from starlette.routing import Route

from ems.cli import build_app
from ems.cli.node_file import read_file, settings
from ems.config import GIB, NodeConfig, parse_size
from ems.doctor.gathering import read_cluster
from ems.pool.http.app import build_app as build_http
from ems.pool.tenants import store
from ems.pool.tiers.settings import parse_tier
from ems.router.kthena.objects import RESOURCES
from tests.deploy.rendered import DEPLOY, KUBERNETES, OVERLAYS, SCRIPTS, config_map, named, node_of, pods
from tests.deploy.test_pods import SECRETS

Parsed = tuple[Callable[..., object], dict[str, Any]]


def parse(tokens: Sequence[str]) -> Parsed:
    """The verb that a command line of ``ems`` calls, and its arguments."""
    verb, bound, _ = build_app(tokens).parse_args(list(tokens), exit_on_error=False, print_error=False)
    return verb, bound.arguments


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def config(overlay: str, tmp_path: Path) -> NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text(config_map(f"overlays/{overlay}", "ems-node")["node.toml"])
    return settings(read_file(path))


def test_the_command_line_of_the_node_is_one(overlay: str) -> None:
    _, container = node_of(overlay)
    verb, arguments = parse(container["args"])
    assert verb.__name__ == "node"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(arguments["config"]) in mounted


def test_a_flag_that_is_none_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--confg"):
        parse(["node", "--confg", "/etc/ems/node.toml"])


def test_the_files_of_the_node_are_mounted_where_it_looks(config: NodeConfig, overlay: str) -> None:
    spec, container = node_of(overlay)
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[places[str(config.directory)]]["hostPath"]["path"] == "/dev/shm/ems"
    assert str(config.socket.parent) in places
    assert config.tenants is not None
    assert config.http_token_file is not None
    for path in (config.tenants, config.http_token_file):
        secret = volumes[places[str(path.parent)]]["secret"]
        assert path.name in SECRETS[secret["secretName"]]
        assert not secret["defaultMode"] & 0o077  # the node refuses files that others can read


def test_the_node_takes_part_in_the_cluster_whose_file_and_seal_are_mounted(overlay: str) -> None:
    spec, container = node_of(overlay)
    tier = parse_tier(next(one["value"] for one in container["env"] if one["name"] == "EMS_TIER"))
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[places[tier.place]]["configMap"]["name"].startswith("ems-mooncake")
    assert tier.seal_key is not None
    secret = volumes[places[str(tier.seal_key.parent)]]["secret"]
    assert tier.seal_key.name in SECRETS[secret["secretName"]]
    assert not secret["defaultMode"] & 0o077


def test_probes_and_monitors_ask_the_port_and_pages_that_the_node_has(config: NodeConfig, overlay: str) -> None:
    _, container = node_of(overlay)
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": config.http_port}
    assert config.http_host == "0.0.0.0"
    pages = {route.path for route in build_http(Mock()).routes if isinstance(route, Route)}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in pages
    monitor = named(f"overlays/{overlay}", "PodMonitor", "ems-node")["spec"]["podMetricsEndpoints"][0]
    assert monitor["path"] in pages
    assert monitor["authorization"]["credentials"]["key"] in SECRETS["ems-http-token"]


def test_the_memory_of_the_pod_holds_pool_and_what_the_cluster_gets(
    config: NodeConfig, overlay: str, tmp_path: Path
) -> None:
    _, container = node_of(overlay)
    (tmp_path / "mooncake.json").write_text(config_map(f"overlays/{overlay}", "ems-mooncake")["mooncake.json"])
    cluster = read_cluster(parse_tier(f"mooncake:{tmp_path}/mooncake.json"), {})
    limit = parse_size(container["resources"]["limits"]["memory"])
    assert limit >= config.size + cluster.memory + GIB
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("where", [*OVERLAYS, "systemd"])
def test_each_file_for_mooncake_makes_sense(where: str, tmp_path: Path) -> None:
    path = DEPLOY / "systemd/mooncake.json"
    if where != "systemd":
        path = tmp_path / "mooncake.json"
        path.write_text(config_map(f"overlays/{where}", "ems-mooncake")["mooncake.json"])
    cluster = read_cluster(parse_tier(f"mooncake:{path}"), {})
    assert cluster.problem == ""
    assert cluster.masters[0].endswith(":2379")


def test_masters_ask_the_etcd_that_clients_ask(overlay: str) -> None:
    folder = f"overlays/{overlay}"
    (master,) = (
        pod["spec"]["containers"][0] for pod in pods(folder) if pod["spec"]["containers"][0]["name"] == "master"
    )
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in master["args"])
    file = json.loads(config_map(folder, "ems-mooncake")["mooncake.json"])
    assert file["master_server_address"] == f"etcd://{flags['etcd_endpoints']}"
    ports = {port["name"]: str(port["containerPort"]) for port in master["ports"]}
    assert (ports["rpc"], ports["metrics"]) == (flags["rpc_port"], flags["metrics_port"])
    name, namespace, _ = flags["etcd_endpoints"].partition(":")[0].split(".")
    service = named(folder, "Service", name)
    assert service["metadata"]["namespace"] == namespace
    assert f":{service['spec']['ports'][0]['port']}" in flags["etcd_endpoints"]


def test_members_of_etcd_name_each_other(overlay: str) -> None:
    etcd = named(f"overlays/{overlay}", "StatefulSet", "ems-etcd")
    (members,) = (
        argument.partition("=")[2]
        for argument in etcd["spec"]["template"]["spec"]["containers"][0]["command"]
        if argument.startswith("--initial-cluster=")
    )
    service, namespace = etcd["spec"]["serviceName"], etcd["metadata"]["namespace"]
    names = [f"ems-etcd-{number}" for number in range(etcd["spec"]["replicas"])]
    assert members == ",".join(f"{name}=http://{name}.{service}.{namespace}.svc:2380" for name in names)


def test_engines_name_a_connector_that_ems_serves() -> None:
    for example in ("vllm", "vllm-cuda", "vllm-cce"):
        (pod,) = pods(f"examples/{example}")
        (said,) = (
            one.partition("=")[2]
            for one in pod["spec"]["containers"][0]["args"]
            if one.startswith("--kv-transfer-config")
        )
        assert json.loads(said) == {"kv_connector": "EmsStoreConnector", "kv_role": "kv_both"}


def test_the_router_is_called_with_flags_that_it_has_and_may_list_what_it_watches() -> None:
    folder = "examples/router"
    (pod,) = pods(folder)
    (container,) = pod["spec"]["containers"]
    verb, arguments = parse(container["args"])
    assert verb.__name__ == "router"
    assert arguments["in_cluster"] is True
    assert arguments["drain_timeout"] < pod["spec"]["terminationGracePeriodSeconds"]
    assert arguments["port"] == container["ports"][0]["containerPort"]
    role = named(folder, "Role", "ems-router")
    allowed = {(group, one) for rule in role["rules"] for group in rule["apiGroups"] for one in rule["resources"]}
    watched = {(one.api_version.rpartition("/")[0], one.plural) for one in RESOURCES}
    assert allowed == watched
    assert all(rule["verbs"] == ["list", "watch"] for rule in role["rules"])


@pytest.fixture(scope="module")
def secrets() -> list[dict[str, Any]]:
    """What secrets.sh prints."""
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    command = [str(KUBERNETES / "secrets.sh"), "default", "another"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_secrets_are_made_with_all_keys_that_pods_name(secrets: list[dict[str, Any]]) -> None:
    made = {one["metadata"]["name"]: set(one["data"]) for one in secrets}
    assert made == SECRETS | {"ems-tenant-another": SECRETS["ems-tenant-default"]}
    assert {one["metadata"]["namespace"] for one in secrets} == {"ems"}


def test_the_node_reads_the_tenants_in_the_secret_and_knows_their_keys(
    secrets: list[dict[str, Any]], tmp_path: Path
) -> None:
    data = {one["metadata"]["name"]: one["data"] for one in secrets}
    path = tmp_path / "tenants.json"
    path.write_bytes(base64.b64decode(data["ems-tenants"]["tenants.json"]))
    path.chmod(0o600)
    assert sorted(store.read(path).tenants) == ["another", "default"]
    key = base64.b64decode(data["ems-tenant-default"]["access-key"])
    assert base64.b64decode(data["ems-tenant-default"]["access-id"]) == b"default"
    assert len(key) >= 32
    assert key == key.strip()


UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def unit_commands(path: Path) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^ExecStart=(.+)$", path.read_text(), re.MULTILINE)]


def test_the_unit_of_the_node_calls_ems_with_its_file(tmp_path: Path) -> None:
    ((program, *tokens),) = unit_commands(DEPLOY / "systemd/ems-node.service")
    assert program == "/opt/ems/bin/ems"
    verb, arguments = parse(tokens)
    assert verb.__name__ == "node"
    assert arguments["config"] == Path("/etc/ems/node.toml")
    config = settings(read_file(DEPLOY / "systemd/node.toml"))
    text = (DEPLOY / "systemd/ems-node.service").read_text()
    assert f"ReadWritePaths={config.directory}" in text
    assert config.socket.parent == Path("/run") / re.findall(r"^RuntimeDirectory=(.+)$", text, re.MULTILINE)[0]


def test_units_are_well_formed_and_hardened(tmp_path: Path) -> None:
    """``systemd-analyze`` itself looks at them, in a root where the programs that they start exist."""
    places = {command[0] for unit in UNITS for command in unit_commands(unit)} | {"/bin/kill"}
    for place in places:
        program = tmp_path / place.lstrip("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    installed = tmp_path / "etc/systemd/system"
    installed.mkdir(parents=True)
    system = tmp_path / "usr/lib/systemd"
    system.mkdir(parents=True)
    (system / "system").symlink_to("/usr/lib/systemd/system")
    for unit in UNITS:
        (installed / unit.name).write_text(unit.read_text())
    verify = ["systemd-analyze", "verify", f"--root={tmp_path}", *(unit.name for unit in UNITS)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "ems-" in line]) == (0, [])
    for unit in UNITS:
        rated = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", str(unit)]
        assert subprocess.run(rated, capture_output=True, check=False).returncode == 0, unit.name


def test_container_files_pass_the_linter() -> None:
    files = sorted((DEPLOY / "containers").glob("*.Containerfile"))
    assert len(files) == 2
    done = subprocess.run([SCRIPTS / "hadolint", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
