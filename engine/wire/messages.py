"""The messages between gateway and engine: msgspec structs as MessagePack, each in one frame (`engine.wire.framing`).

Gateway to engine:

* ConfigureTeams: the table of teams;
* Submit: a request;
* Abort: the end of a request whose caller has left.

Engine to gateway:

* Hello: the first message;
* StepDone: one for each step, with all its token events;
* ServiceSamples: about once a second while requests run;
* Refused: the answer to a Submit that the engine cannot take.

Fields that end in `_us` are durations in microseconds, measured with the engine's monotonic clock.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from policies.team_counters import TeamCounters

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 filter nothing. Bounds: `engine.sampling`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # 64 bits with its sign; the gateway draws a seed when the caller gives none
    max_tokens: int = 16  # the engine lowers it to what fits the context and the KV pool
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class TeamEntry(msgspec.Struct, frozen=True, kw_only=True):
    """policies.TeamTerms on the wire."""

    team_id: int
    weight: int
    start_level: int
    starving_after_us: int
    promotion_burst_grants: int


class ConfigureTeams(msgspec.Struct, frozen=True, tag="teams"):
    """The whole table of teams. The gateway sends it right after Hello, and again at each change."""

    teams: tuple[TeamEntry, ...]


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One request. The engine answers with token events and one Finished, or with one Refused."""

    request_id: str
    team_id: int
    start_level: int = 0
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_queue_us: int = 0  # the request ends with "timeout" if it waits this long for its first step; 0 is no limit


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The caller has left. The engine ignores an unknown id, for the request may just have finished."""

    request_id: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway must know of the model that is served."""

    name: str
    path: str  # directory with config.json, tokenizer.json and the chat template
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_threads: int = 1


class ProfileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """policies.StepProfile on the wire."""

    fixed_us: float
    prefill_token_us: float
    prefill_attention_us: float
    decode_row_us: float
    decode_context_us: float


class PolicyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the policy and of swapping, from which the gateway computes the maximum pause."""

    levels: int
    base_quantum_us: int
    fairness_window_us: int
    step_cost_max_us: int
    promotion_percent: int
    grant_us: int
    upload_max_us: int  # T_in of the largest sequence: the time to copy all its KV back to the device
    rate_percent: int = 100  # the part of the device's time that swapping leaves for computing
    theta_cost_us: int | None = None  # of PolicyConfig
    step_us_max: int | None = None  # the longest step, by the profile


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of the engine on every connection."""

    protocol_version: int
    engine_id: str
    epoch: int  # counts the starts of this engine
    pid: int
    kind: str  # "torch" or "sim"
    policy: str
    model: ModelInfo
    profile: ProfileInfo
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_batch_size: int
    max_batch_tokens: int
    block_bytes: int = 0
    block_copy_us: float = 0.0  # time to copy one block one way
    memory_preemption: str = "none"
    max_queued_requests: int = 4096  # further requests are refused with queue_full
    constants: PolicyInfo | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether the engine computes no model: its tokens are made up and its time is modelled."""
        return self.kind == "sim"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request's end: everything that its ledger row needs from the engine. Its `_us` fields are durations."""

    request_id: str
    reason: FinishReason
    message: str = ""  # what went wrong, if the reason is "error"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    device_us: int = 0  # sum of the request's charges
    queued_us: int = 0  # from arrival to the first step, or to the end if the request had no step
    first_token_us: int = 0  # from arrival to the first token; 0 if there was no token
    total_us: int = 0  # from arrival to the end
    level_path: tuple[int, ...] = ()  # levels in the order visited
    num_preemptions: int = 0  # how often the request lost its slot before its end
    num_swaps: int = 0
    num_recomputes: int = 0
    num_promotions: int = 0
    work_us: int = 0  # stand-alone work: what its tokens would have taken alone on the device
    overhead_us: int = 0  # the part of device_us for copies and replays that its team caused
    longest_pause_us: int = 0  # the longest gap between the ends of two steps, the first from arrival on
    pause_bound_us: int = 0  # the largest bound (I8) of its episodes of starving; 0 if it never starved
    pause_of_bound: float = 0.0  # of its episodes of starving, the worst gap / bound; over 1 is a broken promise


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, and what the request has been charged so far."""

    request_id: str
    token_ids: tuple[int, ...]
    device_us: int  # sum of the request's charges so far
    level: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The whole outcome of one step, and the engine's counts after it."""

    step_id: int
    duration_us: int
    tokens: tuple[TokenEvent, ...] = ()
    finished: tuple[Finished, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_free_host_blocks: int = 0
    num_swapped: int = 0  # sequences whose KV is on the host, or on its way there or back
    num_dropped: int = 0  # sequences whose KV is gone and will be computed again


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A Submit that the engine did not take. Nothing was booked. `code` is an error.code of docs/reference.md."""

    request_id: str
    code: str  # context_length_exceeded, queue_full, draining, invalid_request, engine_error
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSample(TeamCounters):
    """One team over one interval (about a second): its counters of that interval (`policies.team_counters`)."""

    team_id: int
    waiting_levels: tuple[int, ...] = ()  # `waiting` by level


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """What one team cost another team in one interval.

    The victim's sequences lost slots or blocks. The causer paid for the copies and replays.
    """

    causer_id: int  # a team id
    victim_id: int  # a team id; may be the causer's
    preemptions: int = 0  # slots lost
    swaps_out: int = 0
    swaps_in: int = 0
    recomputes: int = 0  # KV dropped
    bytes_out: int = 0
    bytes_in: int = 0
    billed_us: int = 0  # device time of the copies and replays, charged to the causer


class ServiceSamples(msgspec.Struct, frozen=True, kw_only=True, tag="samples"):
    """What each active team got in the latest interval."""

    interval_ms: int
    teams: tuple[TeamSample, ...]
    interference: tuple[Interference, ...] = ()
    lag_bound_us: float = 0.0  # the most that two able teams' lags may differ (docs/scheduling.md); 0 is no bound
    stall_us: int = 0  # device time in which steps stood still for copies
    replayed_tokens: int = 0  # tokens computed again after a drop
    num_raised: int = 0  # attempts to run rows that raised an exception


FromGateway = ConfigureTeams | Submit | Abort
FromEngine = Hello | StepDone | Refused | ServiceSamples
