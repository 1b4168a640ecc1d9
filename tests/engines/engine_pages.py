"""Pages of metrics as engines write them."""

from __future__ import annotations

Observed = tuple[float, int]
"""The sum and the count of a histogram."""


def vllm(
    *,
    running: int | None = None,
    waiting: int | None = None,
    kv_usage: float | None = None,
    ttft: Observed | None = None,
    tpot: Observed | None = None,
    rank: int = 0,
) -> bytes:
    gauges = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": kv_usage}
    return _page("vllm", f'engine="{rank}",model_name="m"', gauges, ttft, tpot)


def sglang(
    *,
    running: int | None = None,
    waiting: int | None = None,
    kv_usage: float | None = None,
    ttft: Observed | None = None,
    tpot: Observed | None = None,
) -> bytes:
    gauges = {"num_running_reqs": running, "num_queue_reqs": waiting, "token_usage": kv_usage}
    return _page("sglang", 'model_name="m",tp_rank="0"', gauges, ttft, tpot)


def _page(
    engine: str, labels: str, gauges: dict[str, int | float | None], ttft: Observed | None, tpot: Observed | None
) -> bytes:
    lines = []
    for name, value in gauges.items():
        if value is not None:
            lines += [f"# TYPE {engine}:{name} gauge", f"{engine}:{name}{{{labels}}} {float(value)}"]
    for name, observed in (("time_to_first_token_seconds", ttft), ("inter_token_latency_seconds", tpot)):
        if observed is not None:
            total, count = observed
            lines += [
                f"# TYPE {engine}:{name} histogram",
                f'{engine}:{name}_bucket{{{labels},le="+Inf"}} {float(count)}',
                f"{engine}:{name}_count{{{labels}}} {float(count)}",
                f"{engine}:{name}_sum{{{labels}}} {float(total)}",
            ]
    return ("\n".join(lines) + "\n").encode()
