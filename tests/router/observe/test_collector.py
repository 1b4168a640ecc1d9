from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ems.router.observe.collector import RequestCollector
from ems.router.observe.record import Record
from ems.router.observe.series import MOST_MODELS, AllSeries
from tests.router.observe.records import chosen, record, refused


def page(records: Iterable[Record], active: Iterable[Record] = ()) -> dict[str, float]:
    series = AllSeries()
    for one in records:
        series.finished(one)
    text = generate_latest(RequestCollector(series, active)).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if value)
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


WHERE = "backend_name=default/s,backend_type=model_server"
WHAT = "model=m,model_route=default/r,path=/v1/completions"


def test_counts_under_kthenas_names_and_labels() -> None:
    samples = page([record(), record(), refused()])

    done = f"{WHERE},error_type=successful_request,{WHAT},status_code=200,upstream_model=m"
    assert samples[f"kthena_router_requests_total{{{done}}}"] == 2
    assert (
        samples[f"kthena_router_request_duration_seconds_count{{{WHERE},{WHAT},status_code=200,upstream_model=m}}"] == 2
    )
    assert (
        samples["kthena_router_request_prefill_duration_seconds_count{model=m,path=/v1/completions,status_code=200}"]
        == 2
    )
    assert samples[f"kthena_router_tokens_total{{{WHERE},{WHAT},token_type=output,upstream_model=m}}"] == 16
    assert samples["kthena_router_fairness_queue_dequeue_total{model=m,user_id=_all}"] == 2
    assert samples["kthena_router_prefix_cache_match_ratio_sum{model=m}"] == 1.5
    refusal = [name for name in samples if "error_type=rate_limit" in name]
    assert [samples[name] for name in refusal] == [1]


def test_times_of_our_own() -> None:
    samples = page([record(affinity=True), record(affinity=False), record(affinity=True)])

    assert round(samples["ems_router_time_to_first_token_seconds_sum{model=m}"], 6) == 1.5
    assert round(samples["ems_router_handoff_seconds_sum{model=m}"], 6) == 0.3
    assert samples["ems_router_queue_seconds_count{model=m}"] == 3
    assert samples["ems_router_affinity_requests_total{model=m,outcome=hit}"] == 2


def test_what_is_going_on() -> None:
    waiting = refused(model="m")
    over = [refused(error_type=f"{kind}_rate_limit") for kind in ("input", "input", "output")]
    samples = page([record(), *over, refused(model="other", error_type="input_rate_limit")], [chosen(), waiting])

    assert samples["kthena_router_active_requests{}"] == 2
    assert samples["kthena_router_active_downstream_requests{model=m}"] == 2
    assert samples["kthena_router_fairness_queue_size{model=m,user_id=_all}"] == 1
    assert samples["kthena_router_fairness_queue_inflight{model=m}"] == 1
    upstream = f"{WHERE},model_route=default/r,model_server=default/s,upstream_model=m"
    assert samples[f"kthena_router_active_upstream_requests{{{upstream}}}"] == 1
    exceeded = "kthena_router_rate_limit_exceeded_total{limit_type=%s,model=%s,path=/v1/completions}"
    assert samples[exceeded % ("input_tokens", "m")] == 2
    assert samples[exceeded % ("output_tokens", "m")] == 1
    assert samples[exceeded % ("input_tokens", "unknown")] == 1


def test_clients_cannot_make_up_labels() -> None:
    made_up = [refused(model=f"x{number}", status=404, error_type="route_not_found") for number in range(1000)]
    many = [record(model=f"m{number}", upstream_model=f"m{number}") for number in range(1000)]
    series = AllSeries()
    for one in made_up + many:
        series.finished(one)

    assert len({labels.model for labels in series.by_labels}) == MOST_MODELS + 1
    assert len(series.by_labels) <= MOST_MODELS + 2
