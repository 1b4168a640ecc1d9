"""What the tools of accelerators print, in the form that their makers' documents show, for a seam without hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ems.doctor.devices import Run

NPU_SMI = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t1                              0                              1                              Ascend 910B3
\t1                              1                              -                              Mcu
"""
NPU_SMI_WITH_PHYSICAL = """\
\tNPU ID             Chip ID            Chip Logic ID      Chip Phy-ID        Chip Name
\t0                  0                  0                  0                  Ascend910
\t0                  1                  1                  1                  Ascend910
"""
TLS_OFF = (
    "dev_id:0, tls switch[0](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), "
    "tls alarm time threshold[60]days\n"
    "dev_id:0, [pub cert] info:\n\t issuer[/C=CN/ST=GD/O=HUAWEI/OU=2012/CN=2_1thCA]\n"
)
TLS_ON = TLS_OFF.replace("tls switch[0]", "tls switch[1]")
HCCN = {
    "-link": "link status: UP\n",
    "-net_health": "net health status: Success\n",
    "-ip": "ipaddr:10.20.0.10\nnetmask:255.255.255.0\n",
    "-tls": TLS_OFF,
}
PING_SUCCESS = """\
device 0 PING 10.20.1.10
recv seq=0,time=0.041000ms
3 packets transmitted, 3 received, 0.00% packet loss
"""
PING_LOST = "device 0 PING 10.20.1.10\n3 packets transmitted, 0 received, 100.00% packet loss\n"
NVIDIA_SMI = "0, NVIDIA H100 80GB HBM3\n1, NVIDIA H100 80GB HBM3\n"
NVLINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def ascend_host(changed: Mapping[tuple[int, str], str | None] = {}) -> Run:
    """A host with two NPUs; ``changed`` are other answers of ``hccn_tool``, by device and flag."""

    def run(command: Sequence[str]) -> str | None:
        if list(command) == ["npu-smi", "info", "-m"]:
            return NPU_SMI
        if command[0] != "hccn_tool":
            return None
        device, flag = int(command[2]), command[3]
        if flag == "-ping":
            return PING_SUCCESS
        if (device, flag) in changed:
            return changed[device, flag]
        return HCCN[flag].replace("10.20.0.10", f"10.20.0.1{device}")

    return run


def cuda_host(command: Sequence[str]) -> str | None:
    if command[0] != "nvidia-smi":
        return None
    return NVLINKS if command[1] == "nvlink" else NVIDIA_SMI


def no_tools(command: Sequence[str]) -> str | None:
    return None
