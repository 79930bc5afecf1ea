"""The names that dashboards and load balancers made for vLLM read, with vLLM's types, buckets and labels.

From vllm/v1/metrics/loggers.py and the metrics part of the model server protocol of
kubernetes-sigs/gateway-api-inference-extension, which reads queue length, running count, KV use, and block size and
number of blocks from `vllm:cache_config_info`. Left out, because the engine has nothing to say: the prefix cache's
counters (there is no prefix cache) and `vllm:kv_block_lifetime_seconds` (blocks are not sampled one by one).
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from engine.wire.messages import Hello, StepDone
from gateway.metrics.requests import Meters
from gateway.metrics.shares import ServiceMeters

ENGINE = "0"  # vLLM's index of an engine behind one listener
_LABELS = ["model_name", "engine"]


def vllm_metrics(meters: Meters, service: ServiceMeters, hello: Hello, step: StepDone | None) -> Iterable[Metric]:
    """One scrape's families. `step` is the latest one while anything is open."""
    model = meters.model(hello.model.name)
    total = hello.num_device_blocks
    used = 1 - step.num_free_blocks / total if step is not None and total else 0.0
    for name, text, value in (
        ("vllm:num_requests_running", "Sequences in the latest step.", step.num_running if step else 0),
        ("vllm:num_requests_waiting", "Sequences that are not in the latest step.", step.num_waiting if step else 0),
        ("vllm:kv_cache_usage_perc", "Part of the device's KV blocks in use; 1 is all.", used),
    ):
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric([model, ENGINE], value)
        yield gauge
    config = {
        "block_size": str(hello.block_size),
        "num_gpu_blocks": str(total),
        "num_cpu_blocks": str(hello.num_host_blocks),
        "enable_prefix_caching": "False",
        "engine": ENGINE,
    }
    info = GaugeMetricFamily("vllm:cache_config_info", "The KV pool, as labels; always 1.", labels=list(config))
    info.add_metric(list(config.values()), 1)
    yield info
    # vLLM counts sequences that lost their KV; ours that only lose their slot are terazi_preemptions_total.
    text = "Times a sequence lost its KV blocks: swapped out or dropped."
    preemptions = CounterMetricFamily("vllm:num_preemptions", text, labels=_LABELS)
    preemptions.add_metric([model, ENGINE], service.swaps["out"] + service.recomputes)
    yield preemptions
    yield from _tokens(meters)
    text = "Requests that ended: stop, length, abort (left, timed out, shut down) or error."
    success = CounterMetricFamily("vllm:request_success", text, labels=[*_LABELS, "finished_reason"])
    for (name, reason), count in sorted(meters.finished.items()):
        success.add_metric([name, ENGINE, reason], count)
    yield success
    for name, text, children in (
        ("vllm:time_to_first_token_seconds", "Receiving to first token.", meters.first_tokens),
        ("vllm:e2e_request_latency_seconds", "Receiving to end.", meters.phases["e2e"]),
        ("vllm:request_queue_time_seconds", "Admission to first step.", meters.phases["queue"]),
        ("vllm:request_prefill_time_seconds", "First step to first token.", meters.phases["prefill"]),
        ("vllm:request_decode_time_seconds", "First token to end.", meters.phases["decode"]),
    ):
        histogram = HistogramMetricFamily(name, text, labels=_LABELS)
        for labels, child in children.items():
            child.show(histogram, [*labels, ENGINE])
        yield histogram
    gaps = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Between two arrivals of tokens.", labels=_LABELS)
    meters.gaps.show(gaps, [model, ENGINE])
    yield gaps


def _tokens(meters: Meters) -> Iterable[Metric]:
    sums: dict[tuple[str, str], int] = {}
    for _, team in meters.teams():
        for labels, count in team.tokens.items():
            sums[labels] = sums.get(labels, 0) + count
    for kind, name in (("prompt", "vllm:prompt_tokens"), ("output", "vllm:generation_tokens")):
        family = CounterMetricFamily(name, f"Tokens of requests that ended: {kind}.", labels=_LABELS)
        for (model, which), count in sorted(sums.items()):
            if which == kind:
                family.add_metric([model, ENGINE], count)
        yield family
