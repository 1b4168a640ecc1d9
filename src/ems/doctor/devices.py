"""Accelerators and their network, by what the tools of their makers print.

The tools stand behind one seam, :data:`Run`.  What is printed is parsed and never judged here; a tool that is missing,
fails or hangs leaves its facts empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ems.doctor.facts import Connection, Device

Run = Callable[[Sequence[str]], str | None]
"""What a command prints; None: it is not there, failed, or took too long."""

_ADDRESS = re.compile(r"ipaddr:\s*([0-9A-Fa-f.:]+)")
_HCCN = re.compile(r"^\s*address_([0-9]{1,3})\s*=\s*([0-9A-Fa-f.:]+)\s*$", re.MULTILINE)
_LINK = re.compile(r"link status:\s*(\w+)")
_HEALTH = re.compile(r"net health status:\s*([^\n]+?)\s*$", re.MULTILINE)
_TLS = re.compile(r"tls switch\[([01])\]")
_NO_TLS = "no certificate"
_GPU_LINKS = re.compile(r"^GPU ([0-9]+):", re.MULTILINE)


def npus(run: Run) -> list[Device]:
    """The NPUs that ``npu-smi info -m`` lists, each with what ``hccn_tool`` says of its network."""
    listed = run(["npu-smi", "info", "-m"]) or ""
    # Columns are NPU, chip, logic number, (physical number,) name; a chip without a logic number is no accelerator.
    rows = [line.split() for line in listed.splitlines()]
    chips = [row for row in rows if len(row) >= 4 and all(cell.isdecimal() for cell in row[:3])]
    return [_npu(run, number, _chip_name(row)) for number, row in enumerate(chips)]


def _chip_name(row: Sequence[str]) -> str:
    return " ".join(cell for cell in row[3:] if not cell.isdecimal())


def _npu(run: Run, number: int, name: str) -> Device:
    def ask(what: str, pattern: re.Pattern[str]) -> str:
        found = pattern.search(run(["hccn_tool", "-i", str(number), f"-{what}", "-g"]) or "")
        return found[1] if found else ""

    tls = run(["hccn_tool", "-i", str(number), "-tls", "-g"]) or ""
    switch = _TLS.search(tls)
    return Device(
        number,
        name,
        link=ask("link", _LINK).upper(),
        health=ask("net_health", _HEALTH),
        address=ask("ip", _ADDRESS),
        tls=switch[1] == "1" if switch else False if _NO_TLS in tls.lower() else None,
    )


def ping(run: Run, device: Device, address: str) -> Connection:
    """Whether ``device`` reaches the NPU at ``address`` of another host."""
    said = run(["hccn_tool", "-i", str(device.number), "-ping", "-g", "address", address]) or ""
    reached = "ping success" in said or re.search(r"\b0\.0+% packet loss", said)
    return Connection(f"{device.number} -> {address}", "device", "" if reached else "no answer")


def hccn_addresses(text: str) -> dict[int, str]:
    """The addresses of NPUs, by number, that the text of an ``hccn.conf`` has."""
    return {int(number): address for number, address in _HCCN.findall(text)}


def gpus(run: Run) -> list[Device]:
    """The GPUs that ``nvidia-smi`` lists, with the number of their links that do not work."""
    listed = run(["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]) or ""
    links = _inactive_nvlinks(run(["nvidia-smi", "nvlink", "--status"]) or "")
    rows = [line.partition(",") for line in listed.splitlines()]
    return [
        Device(int(number), name.strip(), inactive_nvlinks=links.get(int(number), 0))
        for number, _, name in rows
        if number.strip().isdecimal()
    ]


def _inactive_nvlinks(text: str) -> dict[int, int]:
    pieces = _GPU_LINKS.split(text)[1:]
    return {
        int(number): len(re.findall(r"inactive", lines, re.IGNORECASE))
        for number, lines in zip(pieces[::2], pieces[1::2], strict=True)
    }
