"""What `/metrics` shows: read from the parts at each scrape, so there is nothing to keep in step.

Each family's help text says exactly what it counts and in which unit; `docs/metrics.md` lists them, with what is left
out and why. Labels are closed sets (outcomes, codes, levels, tiers), models that were served and at most `TEAMS_MAX`
teams; never a key, a user or a request. A scrape looks at each team once, whatever the number of requests.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.wire.messages import Hello, ServiceSamples, StepDone
from gateway.admin.app import render_metrics
from gateway.metrics.shares import ServiceMeters
from gateway.metrics.teams import team_counters, team_gauges
from gateway.metrics.vllm import vllm_metrics
from gateway.openai.state import GatewayState
from gateway.openai.state import not_ready_reasons as not_ready_reasons
from policies.eg_mlfq import EgMlfq
from tenants.leases import Leases
from tenants.quotas import UNLIMITED


class BookedLedger(Protocol):
    """What is shown of `tenants.ledger.Ledger`."""

    num_failures: int

    @property
    def num_open(self) -> int: ...

    @property
    def backlog(self) -> int: ...

    @property
    def is_unwritable(self) -> bool: ...

    def lag_us(self, now_us: int) -> int: ...


class GatewayMetrics(Collector):
    """Adds up the engine's samples and reads the rest when asked. `clock` is monotonic seconds."""

    def __init__(
        self, state: GatewayState, leases: Leases, ledger: BookedLedger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._leases = leases
        self._ledger = ledger
        self._service = ServiceMeters(state.meters, clock)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return render_metrics(self._registry)

    def add(self, samples: ServiceSamples) -> None:
        """One interval of the engine's samples."""
        self._service.add(samples)

    def summary(self) -> dict[str, Any]:
        """Counts since the start and what budgets hold, for `GET /admin/v1/status`. Times are seconds."""
        service, meters = self._service, self._state.meters
        service.expire()
        budgets = {
            meters.label(place): min(sample.budget_us for sample in samples) / 1e6
            for place, samples in sorted(service.latest().items())
        }
        return {
            "since_start": {
                "preemptions": service.preemptions,
                "swaps_out": service.swaps["out"],
                "swaps_in": service.swaps["in"],
                "bytes_out": service.swapped_bytes["out"],
                "bytes_in": service.swapped_bytes["in"],
                "recomputes": service.recomputes,
                "stall_seconds": service.stall_us / 1e6,
                "promotions": sum(sum(team.promotions.values()) for _, team in meters.teams()),
                "kv_blocks_used_peak": self._state.engine.peak_blocks,
            },
            "promotion_budget_seconds": budgets,
        }

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        self._service.expire()
        hello = self._state.engine.hello
        # The latest step says what it ran; when nothing is open, nothing runs and every block is free.
        step = self._state.engine.latest_step if self._state.engine.num_streams else None
        yield from self._requests()
        yield from team_counters(self._state.meters, self._service)
        yield from team_gauges(self._state.meters, self._service)
        yield from self._scheduler(hello, step)
        yield from self._engine(hello)
        yield from self._memory(hello, step)
        yield from self._limits()
        yield from self._store()
        if hello is not None:
            yield from vllm_metrics(self._state.meters, self._service, hello, step)

    def _requests(self) -> Iterable[Metric]:
        meters = self._state.meters
        refused = CounterMetricFamily("terazi_refusals", "Refused calls, by error code.", labels=["code"])
        for code, count in sorted(self._state.refused.items()):
            refused.add_metric([code], count)
        yield refused
        inflight = GaugeMetricFamily("terazi_inflight", "Requests admitted and not booked yet.", labels=["tier"])
        for tier in sorted({team.tier.name for team in meters.live().values()} | meters.inflight.keys()):
            inflight.add_metric([tier], meters.inflight[tier])
        yield inflight
        preparation = self._state.preparation
        text = "Bytes of request bodies that are being read or prepared, as reserved."
        yield _gauge("terazi_body_bytes", text, preparation.held_bytes)
        text = "Requests whose body waits for room to be read."
        yield _gauge("terazi_bodies_waiting", text, preparation.num_waiting)
        text = "Processes started to prepare large bodies. One starts when it is needed and ends when it is idle."
        yield CounterMetricFamily("terazi_prepare_starts", text, value=preparation.process.num_starts)
        text = "Seconds from admission to the first step, or to the end of a request that never ran."
        yield meters.queue.family("terazi_queue_seconds", text, ["tier"])
        text = "Seconds from receiving a request to its first token."
        yield meters.ttft.family("terazi_ttft_seconds", text, ["tier", "model"])
        text = "Seconds between two arrivals of tokens of one request; a pause of it counts as one long gap."
        gaps = HistogramMetricFamily("terazi_itl_seconds", text, labels=[])
        meters.gaps.show(gaps, [])
        yield gaps
        text = (
            "Seconds of the gateway's own work: identify (key and limits), prepare (body read to submitted), "
            "relay (tokens of one step to text)."
        )
        overhead = HistogramMetricFamily("terazi_gateway_overhead_seconds", text, labels=["stage"])
        for stage, histogram in meters.stages.items():
            histogram.show(overhead, [stage])
        yield overhead

    def _scheduler(self, hello: Hello | None, step: StepDone | None) -> Iterable[Metric]:
        state, service = self._state, self._service
        yield _gauge("terazi_ready", "1 when requests can be served.", not not_ready_reasons(state))
        is_fair = state.engine.is_ready and hello is not None and hello.policy == EgMlfq.name
        yield _gauge("terazi_policy_effective", "1 while the connected engine orders requests by fair shares.", is_fair)
        yield _gauge("terazi_running", "Sequences in the latest step.", step.num_running if step else 0)
        yield _gauge("terazi_swapped", "Sequences whose KV is on the host or moving.", step.num_swapped if step else 0)
        yield _gauge("terazi_dropped", "Sequences whose KV is to be recomputed.", step.num_dropped if step else 0)
        yield self._queued(step)
        text = "The fuller of slots and device KV blocks after the latest step, 0 to 1; 0 without work or engine."
        yield _gauge("terazi_saturation", text, saturation(hello, step))
        for name, text, value in (
            ("terazi_preemptions", "Times a sequence lost its slot before its end.", service.preemptions),
            ("terazi_recomputes", "Times a sequence's KV was dropped, to be computed again.", service.recomputes),
            ("terazi_stall_seconds", "Device seconds that steps stood still for copies.", service.stall_us / 1e6),
            ("terazi_engine_exceptions", "Attempts to run rows of a step that raised.", service.num_raised),
        ):
            yield CounterMetricFamily(name, text, value=value)
        for name, text, counts in (
            ("terazi_swaps", "Sequences swapped: out to the host, in to the device.", service.swaps),
            ("terazi_swapped_bytes", "Bytes of KV copied: out to the host, in to the device.", service.swapped_bytes),
        ):
            family = CounterMetricFamily(name, text, labels=["direction"])
            for direction, count in sorted(counts.items()):
                family.add_metric([direction], count)
            yield family

    def _engine(self, hello: Hello | None) -> Iterable[Metric]:
        text = "The connected engine, or the latest one: its kind (torch, or sim: simulated), policy and model."
        about = GaugeMetricFamily("terazi_engine_info", text, labels=["kind", "policy", "model"])
        if hello is not None:
            about.add_metric([hello.kind, hello.policy, hello.model.name], 1)
        yield about
        lives = self._state.engine_lives
        text = "Times the engine was started again, or that the connection to one run by itself was lost."
        yield CounterMetricFamily("terazi_engine_restarts", text, value=lives.num_restarts)
        text = "Short lives of the engine in a row while it is failing; the last one's reason. 0 otherwise."
        failing = GaugeMetricFamily("terazi_engine_failing", text, labels=["reason"])
        # One series at a time, and a new one at most once a pause: the reason is the one label that is no closed set.
        failure = lives.failure
        failing.add_metric([failure.reason if failure else ""], failure.short_lives if failure else 0)
        yield failing

    def _queued(self, step: StepDone | None) -> Metric:
        text = "Sequences that wait (not in a step), by tier and level, after the latest interval."
        family = GaugeMetricFamily("terazi_queued", text, labels=["tier", "level"])
        live = self._state.meters.live()
        queued = {(team.tier.name, 0): 0 for team in live.values()}
        for sample in self._service.last if step else ():
            entry = live.get(sample.team_id)
            tier = "other" if entry is None else entry.tier.name
            for level, count in enumerate(sample.waiting_levels or (sample.waiting,)):
                queued[tier, level] = queued.get((tier, level), 0) + count
        for (tier, level), count in sorted(queued.items()):
            family.add_metric([tier, str(level)], count)
        return family

    def _memory(self, hello: Hello | None, step: StepDone | None) -> Iterable[Metric]:
        totals = {"device": hello.num_device_blocks, "host": hello.num_host_blocks} if hello else {}
        free = dict(totals)
        if step is not None and hello is not None:
            free = {"device": step.num_free_blocks, "host": step.num_free_host_blocks}
        peaks = self._state.engine.peak_blocks
        for name, text, values in (
            ("terazi_kv_blocks", "KV blocks of the pool.", totals),
            ("terazi_kv_blocks_free", "KV blocks that nothing uses, after the latest step.", free),
            ("terazi_kv_blocks_used_peak", "Most KV blocks in use since this process started.", peaks),
        ):
            family = GaugeMetricFamily(name, text, labels=["pool"])
            for pool, value in values.items():
                family.add_metric([pool], value)
            yield family

    def _limits(self) -> Iterable[Metric]:
        meters = self._state.meters
        text = "What the team may still use of a limit that it has: requests and tokens of the minute, concurrent."
        family = GaugeMetricFamily("terazi_limit_remaining", text, labels=["team", "kind"])
        for team in meters.live().values():
            if team.limits == UNLIMITED or not meters.take_place(team.team_id):
                continue
            view = self._leases.view(team)
            for kind in ("requests", "tokens", "concurrent"):
                remaining = getattr(view, kind).remaining
                if remaining is not None:
                    family.add_metric([team.name, kind], remaining)
        yield family
        yield _gauge("terazi_reservations_outstanding", "Reservations not settled yet.", self._leases.outstanding())
        text = (
            "Requests and tokens reserved that are neither settled, released nor outstanding; anything but 0 is a bug."
        )
        yield _gauge("terazi_ledger_imbalance", text, self._leases.imbalance())

    def _store(self) -> Iterable[Metric]:
        ledger = self._ledger
        text = "Age of the oldest ended request whose row is in the journal and not in SQL."
        yield _gauge("terazi_journal_lag_seconds", text, ledger.lag_us(self._state.clock.now_us()) / 1e6)
        yield _gauge("terazi_journal_open", "Requests opened in the journal and not closed.", ledger.num_open)
        text = "1 while the disk does not take the journal's lines, so that no request is admitted."
        yield _gauge("terazi_journal_unwritable", text, ledger.is_unwritable)
        yield _gauge("terazi_ledger_backlog", "Ended requests whose rows are not in SQL yet.", ledger.backlog)
        yield CounterMetricFamily("terazi_store_errors", "SQL transactions that failed.", value=ledger.num_failures)


def saturation(hello: Hello | None, step: StepDone | None) -> float:
    """How full the engine is, 0 to 1: the larger part in use of slots and of device KV blocks."""
    if hello is None or step is None or not hello.num_device_blocks:
        return 0.0
    slots = step.num_running / hello.max_batch_size
    return min(1.0, max(slots, 1 - step.num_free_blocks / hello.num_device_blocks))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
