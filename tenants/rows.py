"""What the ledger books, as frozen values. Columns of LedgerRow are final; instants are UTC epoch microseconds.

A field added later has a default: a journal line written before the upgrade lacks it.
"""

from dataclasses import dataclass
from typing import Literal

from policies.team_counters import TeamCounters

# Before the engine's id in a row whose tokens no model computed.
SIMULATED_PREFIX = "sim:"

Outcome = Literal["ok", "client_closed", "timeout", "error", "lost", "shutdown", "refused"]
# A request with such an outcome was given back before its first step: it is no request of the minute.
GIVEN_BACK: tuple[Outcome, ...] = ("refused", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEntry:
    """A request that has been admitted and is about to go to the engine: what its row needs if we die first."""

    request_id: str
    key_id: int
    key_public_id: str
    project_id: int
    project: str
    team_id: int
    team: str
    tier: str
    model: str
    engine_id: str
    engine_epoch: int
    endpoint: str
    stream: bool
    received_at_us: int
    admitted_at_us: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The latest known progress of an open request; optional, used only if its close never comes."""

    request_id: str
    output_tokens: int
    device_us: int
    started_at_us: int | None = None
    first_token_at_us: int | None = None
    level_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One ended request. Exactly one for each OpenEntry."""

    request_id: str
    key_id: int
    key_public_id: str
    project_id: int
    project: str
    team_id: int
    team: str
    tier: str  # at start
    model: str
    engine_id: str
    engine_epoch: int
    endpoint: str
    stream: bool
    received_at_us: int
    admitted_at_us: int
    started_at_us: int | None = None  # first step
    first_token_at_us: int | None = None
    finished_at_us: int
    prompt_tokens: int  # that count as used: 0 for a request that never ran
    cached_tokens: int = 0  # a part of prompt_tokens
    output_tokens: int = 0
    max_tokens: int
    device_us: int = 0
    level_path: str = ""  # "0>1>2"
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    num_promotions: int = 0
    outcome: Outcome
    finish_reason: str | None = None
    error_code: str | None = None
    attempts: int = 1  # inside the gateway; the team is charged once
    work_us: int = 0  # what it would have taken alone on the device
    overhead_us: int = 0  # the part of device_us for copies and replays that its team caused
    longest_pause_us: int = 0  # longest time it went without a step
    pause_bound_us: int = 0  # largest maximum pause that held for it; 0 if it never starved


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSampleRow(TeamCounters):
    """One team over one interval that ended at `at_us`: its counters of that interval (`policies.team_counters`)."""

    at_us: int
    team_id: int
    interval_ms: int
    lag_bound_us: float = 0.0  # of all teams; 0 is no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceRow:
    """What `causer` cost `victim` over one interval; a team may be its own victim."""

    at_us: int
    causer_id: int
    victim_id: int
    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    recomputes: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    billed_us: int = 0  # charged to the causer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampleRow:
    """The device as a whole over one interval."""

    at_us: int
    interval_ms: int
    stall_us: int = 0  # stood still for copies
    replayed_tokens: int = 0


SampleRow = ServiceSampleRow | InterferenceRow | StepSampleRow
