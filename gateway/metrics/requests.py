"""What has happened to requests and teams since this process started, counted as it happens; `/metrics` shows it.

Labels are bounded. The first TEAMS_MAX teams that do anything or have limits have a place of their own; further ones,
and teams that are not in the snapshot, share the place `other`. An archived team gives its place up, and its counts
with it, so that a place never changes its owner with its counts. Models beyond MODELS_MAX are `other` too. Keys, users,
requests and anything else that a caller chooses are never looked at.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from gateway.metrics.histogram import Histogram, Histograms
from tenants.rows import LedgerRow, OpenEntry
from tenants.snapshot import KnownTeam, Snapshot

TEAMS_MAX = 500
MODELS_MAX = 16
OTHER = "other"
OTHER_ID = -1

STAGES = ("identify", "prepare", "relay")
# Outcomes whose device time nobody has a whole answer for.
WASTED = {"client_closed": "disconnect", "error": "error", "shutdown": "shutdown"}

_STAGE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
# As vLLM has them, so that its dashboards and alerts read ours (vllm/v1/metrics/loggers.py).
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class SnapshotSource(Protocol):
    """Where the tenants are read: `tenants.snapshot.SnapshotHolder`."""

    @property
    def current(self) -> Snapshot: ...


@dataclass(slots=True)
class TeamMeters:
    """One place's counts: of one team, or of all others."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by tier, model, outcome
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # by model, type
    promotions: Counter[str] = field(default_factory=Counter)  # by tier
    totals: Counter[str] = field(default_factory=Counter)  # of the team counters that are summed, by name


class Meters:
    """Counters and histograms of requests, and the places that teams have in them."""

    def __init__(self, source: SnapshotSource, *, teams_max: int = TEAMS_MAX) -> None:
        self._source = source
        self._teams_max = teams_max
        self._seen: Snapshot | None = None
        self._live: dict[int, KnownTeam] = {}
        self._places: dict[int, TeamMeters] = {}
        self._models: set[str] = set()
        self.inflight: Counter[str] = Counter()  # by tier
        self.wasted_us: Counter[str] = Counter(dict.fromkeys(WASTED.values(), 0))
        self.stages = {stage: Histogram(_STAGE_BOUNDS) for stage in STAGES}
        self.queue = Histograms(LATENCY_BOUNDS)  # by tier
        self.ttft = Histograms(TTFT_BOUNDS)  # by tier, model
        self.gaps = Histogram(GAP_BOUNDS)
        # The phases of requests that have ended, by model: for the `vllm:` names.
        self.phases = {name: Histograms(LATENCY_BOUNDS) for name in ("queue", "prefill", "decode", "e2e")}
        self.first_tokens = Histograms(TTFT_BOUNDS)
        self.finished: Counter[tuple[str, str]] = Counter()  # by model, vLLM's finished_reason

    # --- teams --------------------------------------------------------------------------------------------------

    def live(self) -> dict[int, KnownTeam]:
        """The teams there are, by id. Archived ones lose their places here."""
        snapshot = self._source.current
        if snapshot is not self._seen:
            self._seen = snapshot
            self._live = {team.team_id: team for team in snapshot.teams}
            for team_id in self._places.keys() - self._live.keys() - {OTHER_ID}:
                del self._places[team_id]
        return self._live

    def place(self, team_id: int) -> int:
        """The team's own id, or OTHER_ID. A team that is seen for the first time gets a place while there is one."""
        live = self.live()
        if team_id in self._places:
            return team_id
        num_own = len(self._places) - (OTHER_ID in self._places)
        return team_id if team_id in live and num_own < self._teams_max else OTHER_ID

    def team(self, team_id: int) -> TeamMeters:
        """Where this team is counted."""
        place = self.place(team_id)
        found = self._places.get(place)
        if found is None:
            found = self._places[place] = TeamMeters()
        return found

    def take_place(self, team_id: int) -> bool:
        """Whether this team has a place of its own; it takes one while there is one."""
        if self.place(team_id) == OTHER_ID:
            return False
        self.team(team_id)
        return True

    def label(self, place: int) -> str:
        """A place's label: the team's present name."""
        team = self.live().get(place)
        return OTHER if team is None else team.name

    def teams(self) -> list[tuple[str, TeamMeters]]:
        """Every place with its label, by label."""
        self.live()
        return sorted((self.label(place), meters) for place, meters in self._places.items())

    def model(self, name: str) -> str:
        """A model's label: its name while there are few."""
        if name not in self._models:
            if len(self._models) >= MODELS_MAX:
                return OTHER
            self._models.add(name)
        return name

    # --- requests -----------------------------------------------------------------------------------------------

    def opened(self, entry: OpenEntry) -> None:
        """A request was admitted."""
        self.inflight[entry.tier] += 1

    def ended(self, row: LedgerRow) -> None:
        """Its row was booked: exactly one for each `opened`."""
        model, tier = self.model(row.model), row.tier
        self.inflight[tier] -= 1
        team = self.team(row.team_id)
        team.requests[tier, model, row.outcome] += 1
        team.tokens[model, "prompt"] += row.prompt_tokens
        team.tokens[model, "output"] += row.output_tokens
        if row.outcome in WASTED:
            # Copies and replays are counted apart, for all requests, by `gateway.metrics.shares`.
            self.wasted_us[WASTED[row.outcome]] += row.device_us - row.overhead_us
        reason = row.finish_reason or ("error" if row.outcome == "error" else "abort")
        self.finished[model, reason] += 1
        self._observe_times(row, tier, model)

    def _observe_times(self, row: LedgerRow, tier: str, model: str) -> None:
        # A request that ran and was lost with its engine does not know when it started.
        if row.started_at_us is not None or not (row.device_us or row.output_tokens):
            waited = (row.started_at_us or row.finished_at_us) - row.admitted_at_us
            self.queue[(tier,)].observe(waited / 1e6)
            self.phases["queue"][(model,)].observe(waited / 1e6)
        self.phases["e2e"][(model,)].observe((row.finished_at_us - row.received_at_us) / 1e6)
        if row.first_token_at_us is None:
            return
        first = (row.first_token_at_us - row.received_at_us) / 1e6
        self.ttft[tier, model].observe(first)
        self.first_tokens[(model,)].observe(first)
        self.phases["decode"][(model,)].observe((row.finished_at_us - row.first_token_at_us) / 1e6)
        if row.started_at_us is not None:
            self.phases["prefill"][(model,)].observe((row.first_token_at_us - row.started_at_us) / 1e6)

    @property
    def outcomes(self) -> Counter[str]:
        """Ended requests by outcome, over all places."""
        found: Counter[str] = Counter()
        for team in self._places.values():
            for (_, _, outcome), count in team.requests.items():
                found[outcome] += count
        return found
