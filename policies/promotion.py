"""Promotion budgets: nobody starves, and no team buys the device with its starving requests.

A sequence *starves* when its last step ended at least its team's `starving_after` (alpha) ago. It joins its team's
promotion queue, first in, first out. The head gets a *grant* of G as soon as the team's *budget* b holds that much and
no other grant of the team is open. With a grant it stands in lane P, above level 0, until it has done G of work there,
its steps there have taken 4 G, or it ends; then it is back at its level and place, with its quantum as it was. The
limit in time keeps the next in the queue from waiting for eight decode steps that long prompts of others fill. Any
step, also one it got without a grant, takes it off the queue and starts its wait anew.

A budget is a token bucket of work. It refills at rho = eta * weight / (sum of configured weights), in work-microseconds
per microsecond, up to sigma = `promotion_burst_grants` * G, and pays the work really done in lane P. A step cannot be
cut, so the budget may go below 0. So while the table of teams does not change, promoted work in a window [a, b] is at
most sigma + rho * (b - a) + one step, and all teams in the table together promote at most eta of work per time in the
long run (docs/scheduling.md says why this is not eta of the device). Without budgets promotion is first come, first
served under overload: then everybody starves, and everybody is promoted (FastServe's starvation rule).

A granted sequence that finds no blocks, or that must wait for prompts of its own team, would keep the lane closed for
its whole team. So it hands the grant back at the next step; when its turn comes again it gets what was left. One
without blocks goes to the tail of the queue. One that waits for its team's prompts keeps its place, because all of the
team that have not started wait for the same: the grant goes to the first that has started, if any has.

Grants are given without a look at the gate: a team may stand just above it at the start of every step. Picks obey it.

Budgets are exact: they are kept times 100 * (sum of configured weights), so that what flows in during a microsecond is
an integer. A new table of teams changes that factor; each budget is then rounded down to a whole microsecond of work.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

from policies.accounts import RankedSequence, TeamShare, was_taken
from policies.bounds import GRANT_TIME_PARTS
from policies.config import PolicyConfig
from policies.sequences import Starving

_WHOLE = 100  # promotion_percent is in percent
_SLACK = 64  # entries of ended sequences that may stay in the heap beside the live ones


class Budget:
    """One team's bucket and promotion queue. Amounts are work-microseconds times `unit`."""

    __slots__ = (
        "amount",
        "funded_us",
        "has_grant",
        "is_awaited",
        "is_held_back",
        "queue",
        "rate",
        "refilled_at",
        "team",
        "top",
        "unit",
    )

    def __init__(self, team: TeamShare, now_us: int) -> None:
        self.team = team
        self.queue: dict[RankedSequence, None] = {}
        self.has_grant = False  # one is open
        self.is_held_back = False  # its latest grant came back because nothing new of the team may start
        self.is_awaited = False  # the time when it holds a grant is in `Promotions._funded`
        self.funded_us = 0  # that time
        self.unit = 0  # 0: never configured; then it starts full
        self.rate = 0  # what flows in during a microsecond
        self.top = 0  # sigma
        self.amount = 0  # b, as of `refilled_at`
        self.refilled_at = now_us

    def refill(self, now_us: int) -> None:
        """Bring `amount` up to `now_us`. What would flow over the top is lost."""
        elapsed = now_us - self.refilled_at
        if elapsed > 0:
            self.amount = min(self.top, self.amount + elapsed * self.rate)
            self.refilled_at = now_us

    def held_us(self, now_us: int) -> int:
        """b at `now_us`, in whole work-microseconds rounded down."""
        elapsed = max(0, now_us - self.refilled_at)
        return min(self.top, self.amount + elapsed * self.rate) // self.unit if self.unit else 0


class Promotions:
    """Owns who starves, the promotion queues, the budgets and the grants, and says when a sequence begins to starve.
    Costs nothing for those that do not: each sequence is looked at once in alpha, each budget when it can pay.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.percent = config.promotion_percent
        self.grant_us = config.promotion_grant_us
        self._budgets: dict[TeamShare, Budget] = {}
        self._due: list[tuple[int, int, RankedSequence]] = []  # when it would starve, unless it has run since
        self._gone = 0  # entries of `_due` that may belong to ended sequences
        self._to_look: dict[Budget, None] = {}  # budgets whose queue has a new head
        self._funded: list[tuple[int, int, Budget]] = []  # when a budget with a queue holds a grant
        self._begun_us = 0  # when the present step began
        self.step_us = 0  # how long the step that is being booked took, by the profile
        self._granted: dict[RankedSequence, None] = {}  # with an open grant
        self._held_back: dict[RankedSequence, None] = {}  # of these, those that waited for their own team

    def configure(self, teams: Iterable[TeamShare], now_us: int) -> None:
        """The table of teams has changed: rates, tops and alpha follow it. Open grants stay open."""
        if not self.percent:
            return
        known = list(teams)
        unit = _WHOLE * max(1, sum(team.weight for team in known if team.is_configured))
        for gone in self._budgets.keys() - set(known):
            self._to_look.pop(self._budgets.pop(gone), None)
        for team in known:
            budget = self._budgets.get(team)
            if budget is None:
                budget = self._budgets[team] = Budget(team, now_us)
            else:
                budget.refill(now_us)
            budget.top = team.terms.promotion_burst_grants * self.grant_us * unit
            held = budget.amount // budget.unit * unit if budget.unit else budget.top
            budget.amount = min(held, budget.top)
            budget.unit = unit
            budget.rate = self.percent * team.weight
            budget.refilled_at = now_us
            budget.is_awaited = False
            if budget.queue:
                self._to_look[budget] = None
        self._funded.clear()
        self._rebuild()

    def watch(self, sequence: RankedSequence, now_us: int) -> None:
        """A sequence has arrived; its wait begins."""
        if self.percent:
            sequence.last_service = now_us
            self._push_due(sequence)

    def forget(self, sequence: RankedSequence) -> None:
        """A sequence has ended, in whatever state."""
        if not self.percent:
            return
        if sequence.is_starving:
            self._dequeue(sequence)
        elif sequence.grant_left > 0:
            self._close(sequence)
        sequence.last_service = -1
        self._gone += 1
        if self._gone > len(self._due) // 2 + _SLACK:
            self._rebuild()

    def hold_back(self, sequence: RankedSequence) -> None:
        """A granted sequence must wait for prompts of its own team."""
        self._held_back[sequence] = None

    def _hand_back(self, last_step: int) -> None:
        """Take back the grants of sequences that could not run in the step before."""
        for sequence in list(self._granted):
            if sequence.step != last_step and (sequence.is_refused or sequence in self._held_back):
                sequence.grant_unused = sequence.grant_left
                sequence.team.levels.end_grant(sequence)
                self._close(sequence)
                budget = self._budgets[sequence.team]
                sequence.is_starving = True
                if sequence in self._held_back:
                    budget.queue = {sequence: None, **budget.queue}
                    budget.is_held_back = True
                else:
                    budget.queue[sequence] = None
                self._to_look[budget] = None
        self._held_back.clear()

    def begin(self, now_us: int, last_step: int) -> list[Starving]:
        """Queue those that starve by now, and give out the grants that budgets can pay. The step before this one was
        `last_step`. Returns who has been queued.
        """
        if self._granted:
            self._hand_back(last_step)
        due = self._due
        self._begun_us = now_us
        starving: list[Starving] = []
        while due and due[0][0] <= now_us:
            entry_us, place, sequence = due[0]
            if sequence.last_service < 0:
                heappop(due)
                self._gone -= 1
                continue
            starves_us = sequence.last_service + sequence.team.terms.starving_after_us
            if starves_us != entry_us or sequence.place != place:
                heapreplace(due, (starves_us, sequence.place, sequence))
                continue
            heappop(due)
            budget = self._budgets[sequence.team]
            starving.append(self._starving(sequence, budget, now_us))
            sequence.is_starving = True
            budget.queue[sequence] = None
            if len(budget.queue) == 1:
                self._to_look[budget] = None
        funded = self._funded
        while funded and funded[0][0] <= now_us:
            budget = heappop(funded)[2]
            budget.is_awaited = False
            self._to_look[budget] = None
        if self._to_look:
            for budget in self._to_look:
                self._look(budget, now_us)
            self._to_look.clear()
        return starving

    def _starving(self, sequence: RankedSequence, budget: Budget, now_us: int) -> Starving:
        """What is before a sequence that begins to starve: its team's queue, and the holder of its team's grant. That
        one is not counted as ahead once it has run, but its grant is.
        """
        granted = budget.team.levels.granted
        is_waiting = granted is not None and granted.last_service + budget.team.terms.starving_after_us <= now_us
        num_queued = len(budget.queue)
        left_us = max(0, granted.grant_left) if granted is not None else 0
        return Starving(
            sequence.seq_id,
            num_queued + is_waiting,
            num_queued + (granted is not None),
            num_queued * self.grant_us + left_us,
            budget.held_us(now_us),
        )

    def _look(self, budget: Budget, now_us: int) -> None:
        """Open a grant for the head of the queue, or note when there is enough for one."""
        if budget.has_grant or not budget.queue:
            return
        budget.refill(now_us)
        head = next(iter(budget.queue))
        if budget.is_held_back:
            budget.is_held_back = False
            head = next(filter(was_taken, budget.queue), head)
        grant_us = head.grant_unused or self.grant_us
        missing = grant_us * budget.unit - budget.amount
        if missing <= 0:
            del budget.queue[head]
            head.is_starving = head.is_exhausted = False
            head.grant_left = grant_us
            if not head.grant_unused:
                head.num_promotions += 1
                budget.team.totals["promotions"] += 1
            head.grant_unused = 0
            budget.has_grant = True
            self._granted[head] = None
            budget.team.levels.grant(head)
            return
        if not head.is_exhausted:
            head.is_exhausted = True
            budget.team.totals["exhausted"] += 1
        if budget.top >= grant_us * budget.unit:
            funded_us = now_us - (-missing // budget.rate)
            if not budget.is_awaited or funded_us < budget.funded_us:  # a head that needs what is left of a grant
                budget.is_awaited, budget.funded_us = True, funded_us
                heappush(self._funded, (funded_us, budget.team.team_id, budget))

    def end_starving(self, sequence: RankedSequence) -> None:
        """A step was run without a grant by one that starved: its wait begins anew."""
        self._dequeue(sequence)
        self._push_due(sequence)

    def pay(self, sequence: RankedSequence, work_us: int) -> bool:
        """Book a step's work on the grant of `sequence` and on its team's budget; False when it has none."""
        if sequence.grant_left <= 0:
            return False
        budget = self._budgets[sequence.team]
        budget.refill(self._begun_us)
        budget.amount -= work_us * budget.unit
        sequence.team.totals["promoted_us"] += work_us
        sequence.grant_left -= max(work_us, self.step_us // GRANT_TIME_PARTS)
        if sequence.grant_left <= 0:
            sequence.team.levels.end_grant(sequence)
            self._close(sequence)
            self._push_due(sequence)
        return True

    def budget(self, team: TeamShare) -> Budget | None:
        """A team's budget; None when promotion is off."""
        return self._budgets.get(team)

    def wait_us(self, sequence: RankedSequence, num_ahead: int, now_us: int) -> int | None:
        """How long until `sequence` probably gets a grant, `num_ahead` others of its team going before it. 0 when it
        has one, None when promotion is off or its team may keep too little for a grant.
        """
        budget = self._budgets.get(sequence.team)
        if budget is None or budget.top < self.grant_us * budget.unit:
            return None
        if sequence.grant_left > 0:
            return 0
        starves_us = max(0, sequence.last_service + sequence.team.terms.starving_after_us - now_us)
        granted = budget.team.levels.granted
        left_us = max(0, granted.grant_left) if granted is not None else 0
        elapsed = max(0, now_us - budget.refilled_at)
        held = min(budget.top, budget.amount + elapsed * budget.rate)
        missing = ((num_ahead + 1) * self.grant_us + left_us) * budget.unit - held
        return max(starves_us, -(-missing // budget.rate)) if missing > 0 else starves_us

    def _dequeue(self, sequence: RankedSequence) -> None:
        budget = self._budgets[sequence.team]
        is_head = next(iter(budget.queue)) is sequence
        del budget.queue[sequence]
        sequence.is_starving = sequence.is_exhausted = False
        sequence.grant_unused = 0
        if is_head and budget.queue:
            self._to_look[budget] = None

    def _close(self, sequence: RankedSequence) -> None:
        budget = self._budgets[sequence.team]
        budget.has_grant = False
        del self._granted[sequence]
        sequence.grant_left = 0
        if budget.queue:
            self._to_look[budget] = None

    def _push_due(self, sequence: RankedSequence) -> None:
        starves_us = sequence.last_service + sequence.team.terms.starving_after_us
        heappush(self._due, (starves_us, sequence.place, sequence))

    def _rebuild(self) -> None:
        """Drop the entries of ended sequences, and take over a changed alpha."""
        live = [entry[2] for entry in self._due if entry[2].last_service >= 0]
        self._due = [(s.last_service + s.team.terms.starving_after_us, s.place, s) for s in live]
        heapify(self._due)
        self._gone = 0
