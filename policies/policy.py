"""The seam between deciding and doing: a policy ranks sequences, the scheduler packs them into a step.

One step is: `begin(now)`, then `best()` followed by exactly one of `take` or `refuse`, again and again until `best()`
returns None or the step is full (`refuse_new` and `refuse_away` may come anywhere in between), then, once it has run,
`settle(...)`. `leave` may come between steps only.
A policy has no I/O, no clock and no randomness: the same calls give the same answers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from policies.sequences import (
    AS_SERVED,
    Overhead,
    SequenceTerms,
    Served,
    Starving,
    StepTime,
    TeamService,
    TeamTerms,
    Turn,
)


class Policy(Protocol):
    """Orders sequences. The scheduler owns statuses, blocks and slots; the policy owns levels, quanta and lag."""

    name: str

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        """Replace the table of teams. Teams that vanish keep their terms until their last sequence leaves."""

    def arrive(self, sequence: SequenceTerms, now_us: int) -> int:
        """Take in a new sequence and return the level it joins. Raises KeyError for an unknown team.

        Whatever it raises, it raises before it changes anything.
        """

    def fits_again(self, seq_id: int) -> None:
        """`seq_id` was refused and would fit now: its team counts as able to run again. Between steps only."""

    def begin(self, now_us: int) -> list[Starving]:
        """Start picking for one step: every live sequence is a candidate again.

        Returns the sequences that have begun to starve since the last call, the first to starve first. A policy that
        promotes nobody says of nobody that it starves.
        """

    def best(self) -> int | None:
        """The seq_id to try next in this step, or None when no candidate is left. Does not change state."""

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        """`seq_id` (the last `best()`) runs in this step, doing `work_us` of stand-alone work.

        `cost_us` is what its row should cost by the step profile: its marginal time and a part of the step's fixed
        time. None: as much as its work.
        """

    def refuse(self, seq_id: int) -> None:
        """`seq_id` (the last `best()`) cannot run in this step: its blocks are missing or on their way."""

    def refuse_new(self) -> None:
        """Refuse, for this step and all at once, every sequence that was never taken: none of them fits.

        As if each had been refused by itself, without a thousand turns when a thousand wait for blocks.
        """

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        """How long, by the step profile, all prompt rows of a team with live sequences may take in this step; None is
        no limit. Between picks only.

        Without them the step takes `step_us`; `others` says how much of it is for tokens of which other team.
        """

    def leave_prompts(self, team_id: int) -> None:
        """Pass over, in this step, every sequence of the team that has not produced a token: their time is used up.

        They are not refused: they fit, and wait for nothing but their turn.
        """

    def leave_team(self, team_id: int) -> None:
        """Pass over, in this step, every sequence of the team that is not in it yet. They are not refused."""

    def leave_new(self, team_id: int) -> None:
        """Pass over, in this step, every sequence of the team that was never taken: they wait for the team's own
        prompts. They are not refused.
        """

    def set_away(self, seq_id: int, is_away: bool) -> None:
        """The KV of `seq_id` leaves the device, or it is back, or lost altogether. Between picks only."""

    def refuse_away(self) -> None:
        """Refuse, for this step and all at once, every sequence whose KV is away and that was refused when last tried.

        As if each had been refused by itself: that changes nothing but who is offered next.
        """

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        """Which of these teams, all with live sequences, may have blocks kept for it; `holder` is the one that has.

        The holder stays while it may. None: the policy does not look at teams.
        """

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        """The step has run. Charges teams, moves levels. Called also with an empty sequence when nothing ran.

        `overheads` are the parts of the step's cost that belong to no row: each is charged to its team, active or not.
        A row that only replayed tokens has work 0 and cost 0.
        """

    def protect(self, seq_id: int, num_steps: int) -> None:
        """`seq_id` keeps its KV, and should keep its slot, for its next `num_steps` steps; 0 ends this minimum run.

        The memory counts: it says so when a run begins, after each step of the sequence in it, and when the run ends,
        also before its time. The policy only ranks by what it was told last. Between steps only.
        """

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        """When each of these live sequences will run next, soonest first; ties in the order they would be picked.

        `slots` is how many sequences run in a step. Changes nothing; may be called at any time.
        """

    def over_served(self, team_ids: Iterable[int]) -> list[int]:
        """These teams, all with live sequences, from the most over-served to the least. Changes nothing."""

    def ahead_of(self, team_ids: Iterable[int], team_id: int) -> set[int]:
        """Of these teams, all with live sequences, those that the gate would hold back for `team_id`: each is further
        ahead of it than the gate allows. Empty when there is no gate. Changes nothing.
        """

    def is_band_wide(self) -> bool:
        """Lags of able teams may differ by twice as much as ever: sequences are, or were lately, refused for blocks."""

    def num_promotions(self, seq_id: int) -> int:
        """Grants that a live sequence has had."""

    def leave(self, seq_id: int, now_us: int) -> None:
        """`seq_id` finished or was aborted; also for one that never ran."""

    def level(self, seq_id: int) -> int:
        """The present level of a live sequence."""

    def team_service(self) -> list[TeamService]:
        """Running totals of every team that was ever active, by team_id."""
