"""``ems doctor``: look at a host before anything is deployed on it, and say what to do about each finding."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ems.cli.node_file import SYSTEM_FILE, read_file, settings
from ems.cli.options import Flag, Format
from ems.cli.shown import counted, print_json, print_tables, say, table
from ems.config import DEFAULT_HTTP_PORT, parse_size
from ems.doctor.facts import Facts
from ems.doctor.findings import Finding, Host, judge
from ems.doctor.gathering import Wanted, gather
from ems.errors import ConfigError
from ems.pool.tiers.settings import TierConfig, parse_tier

EXIT_WRONG = 1
_SIGNS = {"ok": "ok", "warning": "WARN", "error": "ERROR"}


class Report(msgspec.Struct, frozen=True):
    """What ``-o json`` prints, and what ``--compare`` reads: newer releases may say more."""

    facts: Facts
    findings: list[Finding]


def doctor(
    *,
    config: Path | None = None,
    dir: Annotated[str, Parameter(env_var="EMS_DIR", show_default=False)] = "",  # noqa: A002 - as 'ems node' has it
    size: Annotated[str, Parameter(env_var="EMS_POOL_SIZE", show_default=False)] = "",
    tier: Annotated[list[str] | None, Parameter(env_var="EMS_TIER", negative="")] = None,
    tenants: Annotated[str, Parameter(env_var="EMS_TENANTS", show_default=False)] = "",
    peer: Annotated[list[str] | None, Parameter(negative="")] = None,
    compare: Annotated[list[Path] | None, Parameter(negative="")] = None,
    port: Annotated[list[int] | None, Parameter(negative="")] = None,
    model: Path | None = None,
    mooncake: Path | None = None,
    quiet: Flag = False,
    output: Format = "table",
) -> int:
    """Check this host before anything is deployed on it; nothing is changed.

    Looks at accelerators and their network, shared memory, memory, limits, ports, versions, the clock, other hosts, a
    model's folder and the file for Mooncake. Exit status 1 when there is an error.

    Args:
        config: The node's file of settings, default /etc/ems/node.toml if there.
        dir: The node's folder, as 'ems node' takes it.
        size: The pool's size, as 'ems node' takes it.
        tier: A tier of the node, as 'ems node' takes it; may be repeated.
        tenants: The node's file of tenants, as 'ems node' takes it.
        peer: Another host, as HOST or HOST:PORT; may be repeated.
        compare: What 'ems doctor -o json' printed on another host; may be repeated.
        port: A port that must be free beside the node's own, such as an engine's; may be repeated.
        model: Folder of the model that is to be served.
        mooncake: The mooncake.json that is to be used, default that of the node's tier or MOONCAKE_CONFIG_PATH.
        quiet: Leave out what is well.
    """
    others = [_read(path) for path in compare or ()]
    fields = read_file(config or SYSTEM_FILE) if config or SYSTEM_FILE.exists() else {}
    fields |= {"directory": Path(dir)} if dir else {}
    fields |= {"size": parse_size(size, name="--size")} if size else {}
    fields |= {"tiers": tuple(tier)} if tier else {}
    fields |= {"tenants": Path(tenants)} if tenants else {}
    node = settings(fields)
    cluster = next((one for one in map(parse_tier, node.tiers) if one.kind == "mooncake"), None)
    facts = gather(
        Wanted(
            node=node,
            peers=tuple(_address(one) for one in peer or ()),
            device_addresses=tuple(one.address for other in others for one in other.devices if one.address),
            ports=tuple(_port(one) for one in port or ()),
            model=model,
            cluster=_with_file(cluster, "" if mooncake in (None, Path()) else str(mooncake)),
            tier_known=cluster is not None,
        )
    )
    report = Report(facts, judge(Host(facts, others, served(metadata.requires("ems-kv") or ()))))
    if output == "json":
        print_json(report)
    else:
        _print(report, quiet=quiet)
    return EXIT_WRONG if any(one.level == "error" for one in report.findings) else 0


def _with_file(tier: TierConfig | None, file: str) -> TierConfig | None:
    """The tier that is a cluster; ``file``, if any, goes before what the tier itself names."""
    if tier is None and not (file or os.environ.get("MOONCAKE_CONFIG_PATH")):
        return None
    tier = tier or TierConfig(kind="mooncake", place="")
    return msgspec.structs.replace(tier, place=file) if file else tier


def _port(number: int) -> int:
    if not 0 < number < 65536:
        raise ConfigError(f"--port is {number}, expected 1 to 65535")
    return number


def _print(report: Report, *, quiet: bool) -> None:
    shown = [one for one in report.findings if not (quiet and one.level == "ok")]
    rows = [(_SIGNS[one.level], one.about, f"{one.what}; {one.to_do}" if one.to_do else one.what) for one in shown]
    if rows:
        print_tables(table(("", "CHECK", "FINDING"), rows))
    count = Counter(one.level for one in report.findings)
    errors, warnings = counted(count["error"], "error"), counted(count["warning"], "warning")
    say(f"{report.facts.host}: {errors}, {warnings}, {counted(count['ok'], 'check')} found all well")


def _read(path: Path) -> Facts:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report).facts
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}), give a file that 'ems doctor -o json' wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no report ({error}), expected what 'ems doctor -o json' prints") from error


def _address(peer: str) -> str:
    host, _, port = peer.rpartition(":") if re.search(r":[^\]:]*$", peer) else (peer, "", str(DEFAULT_HTTP_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--peer is {peer!r}, expected HOST, HOST:PORT or [ADDRESS]:PORT")
    return f"{host}:{port}"


def served(requirements: Iterable[str]) -> tuple[str, str]:
    """The bounds for vLLM in EMS's own requirements: the first release that is served, the first that is not."""
    for requirement in requirements:
        first, end = re.search(r">=([\d.]+)", requirement), re.search(r"<([\d.]+)", requirement)
        if re.match(r"vllm[<>=]", requirement) and first and end:
            return first[1], end[1]
    return "", ""
