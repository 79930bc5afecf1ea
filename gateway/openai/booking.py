"""What a request's end means for its tokens and its ledger row. Pure: facts in, numbers out."""

from dataclasses import dataclass

import msgspec

from engine.wire.messages import Hello, ServiceSamples
from gateway.errors import GatewayError
from gateway.link.client import RequestStream
from policies import team_counters
from tenants.rows import (
    SIMULATED_PREFIX,
    InterferenceRow,
    LedgerRow,
    OpenEntry,
    Outcome,
    SampleRow,
    ServiceSampleRow,
    StepSampleRow,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, in the words of its ledger row."""

    outcome: Outcome
    finish_reason: str | None = None
    error_code: str | None = None
    is_refusal: bool = False  # we refused the request: if it never ran, it is given back


UNEXPECTED = Ending("error", error_code="internal_error")
CLIENT_CLOSED = Ending("client_closed", error_code="client_closed")
SHUTDOWN = Ending("shutdown", error_code="draining", is_refusal=True)


def ending_of(error: GatewayError) -> Ending:
    """The ending of a request that is answered with `error`."""
    if error.code == "queue_timeout":
        return Ending("timeout", error_code=error.code, is_refusal=True)
    if error.code == "draining":
        return SHUTDOWN
    return Ending("error", error_code=error.code, is_refusal=error.status < 500 or error.status == 503)


def booked_engine_id(hello: Hello) -> str:
    """The engine's id in ledger rows. A simulated engine's id has a mark, so that every report can tell."""
    return SIMULATED_PREFIX + hello.engine_id if hello.is_simulated else hello.engine_id


def has_run(stream: RequestStream) -> bool:
    """Whether the request was in at least one step."""
    return stream.num_tokens > 0 or stream.device_us > 0


@dataclass(frozen=True, slots=True)
class Use:
    """What one request used. Its quota, its ledger row, the reports, the metrics and the next start all use these
    numbers.

    A request that is given back has None in place of a Use. Its row tells: the outcome is in `tenants.rows.GIVEN_BACK`,
    and the row has no tokens (`tenants.reports.queries.IS_REQUEST`).
    """

    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """The tokens at which the team's minute is settled."""
        return self.prompt_tokens + self.output_tokens


def use_of(entry: OpenEntry, stream: RequestStream | None, ending: Ending) -> Use | None:
    """What the request used; None when the whole request is given back, also its place in the minute.

    * A request that was in a step used its whole prompt, however far its prefill came, and the output it generated.
    * A request that never ran used no tokens. If its client left or the request failed by itself, its place in the
      minute stays taken. If we refused it (queue full, queue timeout, engine lost, shutdown), it is given back.
    * While the engine has not said how far a request had come that its client left, its prompt counts as computed.
    """
    if stream is not None and has_run(stream):
        return Use(entry.prompt_tokens, stream.finished.output_tokens if stream.finished else stream.num_tokens)
    if ending.is_refusal:
        return None
    if ending.outcome == "client_closed" and stream is not None and not stream.is_over:
        return Use(entry.prompt_tokens, 0)
    return Use(0, 0)


def ledger_row(
    entry: OpenEntry,
    stream: RequestStream | None,
    ending: Ending,
    *,
    finished_at_us: int,
    first_token_at_us: int | None,
) -> LedgerRow:
    """The request's ledger row. It has the engine's counts if they have come, else the counts of what was received.

    `finished_at_us` and `first_token_at_us` are microseconds since 1970.
    """
    opened = {name: getattr(entry, name) for name in OpenEntry.__slots__}
    use = use_of(entry, stream, ending)
    opened["prompt_tokens"] = use.prompt_tokens if use is not None else 0
    outcome: Outcome = "refused" if use is None and ending.outcome != "timeout" else ending.outcome
    finished = stream.finished if stream is not None else None
    if stream is None or finished is None:
        return LedgerRow(
            **opened,
            first_token_at_us=first_token_at_us,
            finished_at_us=finished_at_us,
            output_tokens=stream.num_tokens if stream is not None else 0,
            device_us=stream.device_us if stream is not None else 0,
            level_path=str(stream.level) if stream is not None and has_run(stream) else "",
            outcome=outcome,
            finish_reason=ending.finish_reason,
            error_code=ending.error_code,
        )
    admitted = entry.admitted_at_us
    return LedgerRow(
        **opened,
        started_at_us=admitted + finished.queued_us if has_run(stream) else None,
        first_token_at_us=admitted + finished.first_token_us if finished.output_tokens else None,
        finished_at_us=finished_at_us,
        cached_tokens=finished.cached_tokens,
        output_tokens=finished.output_tokens,
        device_us=finished.device_us,
        level_path=">".join(map(str, finished.level_path)),
        num_preemptions=finished.num_preemptions,
        num_swaps=finished.num_swaps,
        num_recomputes=finished.num_recomputes,
        num_promotions=finished.num_promotions,
        work_us=finished.work_us,
        overhead_us=finished.overhead_us,
        longest_pause_us=finished.longest_pause_us,
        pause_bound_us=finished.pause_bound_us,
        outcome=outcome,
        finish_reason=ending.finish_reason,
        error_code=ending.error_code,
    )


def sample_rows(samples: ServiceSamples, at_us: int) -> list[SampleRow]:
    """The rows to book for one interval of the engine's samples, which ended at `at_us`."""
    rows: list[SampleRow] = []
    for team in samples.teams:
        rows.append(
            ServiceSampleRow(
                at_us=at_us,
                team_id=team.team_id,
                interval_ms=samples.interval_ms,
                lag_bound_us=samples.lag_bound_us,
                **team_counters.values(team),
            )
        )
    rows += [InterferenceRow(at_us=at_us, **msgspec.structs.asdict(pair)) for pair in samples.interference]
    rows.append(
        StepSampleRow(
            at_us=at_us,
            interval_ms=samples.interval_ms,
            stall_us=samples.stall_us,
            replayed_tokens=samples.replayed_tokens,
        )
    )
    return rows


def log_fields(row: LedgerRow) -> dict[str, object]:
    """The fields of an ended request's log line: ids, counts and waits, but no prompt and no key."""
    started = row.started_at_us
    return {
        "request_id": row.request_id,
        "key_public_id": row.key_public_id,
        "team": row.team,
        "tier": row.tier,
        "endpoint": row.endpoint,
        "outcome": row.outcome,
        "finish_reason": row.finish_reason,
        "error_code": row.error_code,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "device_us": row.device_us,
        "queue_ms": None if started is None else (started - row.admitted_at_us) // 1000,
        "total_ms": (row.finished_at_us - row.received_at_us) // 1000,
        "levels": row.level_path,
        "preemptions": row.num_preemptions,
        "swaps": row.num_swaps,
        "recomputes": row.num_recomputes,
        "promotions": row.num_promotions,
        "longest_pause_ms": row.longest_pause_us // 1000,
    }
