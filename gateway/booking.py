"""What a request's end means in tokens and in its ledger row. Pure: facts in, numbers out."""

from dataclasses import dataclass

import msgspec

from engine.messages import ServiceSamples
from gateway.engine_client import RequestStream
from gateway.errors import GatewayError
from tenants.rows import InterferenceRow, LedgerRow, OpenEntry, Outcome, SampleRow, ServiceSampleRow, StepSampleRow


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, as its ledger row says it."""

    outcome: Outcome
    finish_reason: str | None = None
    error_code: str | None = None


UNEXPECTED = Ending("error", error_code="internal_error")
CLIENT_CLOSED = Ending("client_closed", error_code="client_closed")
SHUTDOWN = Ending("shutdown", error_code="draining")


def ending_of(error: GatewayError) -> Ending:
    """The ending that an error answer stands for."""
    if error.code == "queue_timeout":
        return Ending("timeout", error_code=error.code)
    if error.code == "draining":
        return SHUTDOWN
    return Ending("error", error_code=error.code)


def has_run(stream: RequestStream) -> bool:
    """It was in at least one step."""
    return stream.num_tokens > 0 or stream.device_us > 0


def tokens_used(entry: OpenEntry, stream: RequestStream, ending: Ending) -> int | None:
    """Tokens to settle, or None when everything is to be given back.

    A caller pays for its prompt and what was really generated. Who left before its first step has made a request and
    used no tokens; whom we refused before its first step (queue timeout, engine lost, shutdown) has not even that.
    While the engine's count is not known, what left it may have computed counts.
    """
    if has_run(stream):
        output = stream.finished.output_tokens if stream.finished else stream.num_tokens
        return entry.prompt_tokens + output
    if ending.outcome != "client_closed":
        return None
    return entry.prompt_tokens if stream.finished is None else 0


def ledger_row(
    entry: OpenEntry,
    stream: RequestStream | None,
    ending: Ending,
    *,
    finished_at_us: int,
    first_token_at_us: int | None,
) -> LedgerRow:
    """The request's one row. The engine's own count wins; without it, what was received of it."""
    opened = {name: getattr(entry, name) for name in OpenEntry.__slots__}
    finished = stream.finished if stream is not None else None
    if stream is None or finished is None:
        return LedgerRow(
            **opened,
            first_token_at_us=first_token_at_us,
            finished_at_us=finished_at_us,
            output_tokens=stream.num_tokens if stream is not None else 0,
            device_us=stream.device_us if stream is not None else 0,
            level_path=str(stream.level) if stream is not None and has_run(stream) else "",
            outcome=ending.outcome,
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
        outcome=ending.outcome,
        finish_reason=ending.finish_reason,
        error_code=ending.error_code,
    )


def sample_rows(samples: ServiceSamples, at_us: int) -> list[SampleRow]:
    """One interval of the engine's samples, which ended at `at_us`, as the rows it is booked in."""
    rows: list[SampleRow] = []
    for team in samples.teams:
        values = msgspec.structs.asdict(team)
        del values["waiting_levels"]  # for metrics only
        rows.append(
            ServiceSampleRow(at_us=at_us, interval_ms=samples.interval_ms, lag_bound_us=samples.lag_bound_us, **values)
        )
    rows += [InterferenceRow(at_us=at_us, **msgspec.structs.asdict(one)) for one in samples.interference]
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
    """The one log line of an ended request: ids, counts and waits; no prompt, no key."""
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
