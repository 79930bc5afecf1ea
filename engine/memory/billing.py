"""Who pays for what a step cost beside its rows' own new tokens: block copies, and tokens computed again after a drop.

The polluter pays: a copy or a replay is billed to the team for whose sequence room was made, on the way out and on the
way back. In the ledger the amount is put on that sequence while it lives, else on the team's oldest live one, else it
is *carried* and put on the team's next sequence that runs. So over any run, the charges of all sequences and what is
carried sum to the measured time exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.request import Sequence as BatchSequence
from policies.sequences import Overhead


@dataclass(slots=True)
class Counts:
    """What one team's sequences cost another's, or its own. `billed_us` was charged to the causer."""

    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    recomputes: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    billed_us: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a copy is made: for which team, for which of its sequences (-1 for none), from whose team's KV."""

    team_id: int
    for_seq: int
    victim_team: int


@dataclass(slots=True)
class Bills:
    """Owns what is carried, and the counts of who cost whom what since they were last taken."""

    carried_us: dict[int, int] = field(default_factory=dict)  # by team
    stall_us: int = 0  # cumulative: time steps stood still for copies
    replayed_tokens: int = 0  # cumulative
    num_raised: int = 0  # cumulative: attempts to run rows of a step that raised
    _counts: dict[tuple[int, int], Counts] = field(default_factory=dict)
    _overheads: dict[int, int] = field(default_factory=dict)  # by team, of the open step
    _charged: dict[int, BatchSequence] = field(default_factory=dict)  # those who pay for it

    def counts(self, causer: int, victim: int) -> Counts:
        """The running counts of a pair of teams."""
        key = causer, victim
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = Counts()
        return found

    def take_counts(self) -> dict[tuple[int, int], Counts]:
        """By (causer, victim), since the last call."""
        taken, self._counts = self._counts, {}
        return taken

    def bill_copies(self, copy_us: int, causes: Sequence[tuple[Cause, int]], live: Mapping[int, BatchSequence]) -> None:
        """Split a step's copy time over the copies (cause, blocks) by their blocks; remainders go to the first ones."""
        total = sum(blocks for _, blocks in causes)
        parts = [copy_us * blocks // total for _, blocks in causes]
        for index in range(copy_us - sum(parts)):
            parts[index % len(parts)] += 1
        for (cause, _), part_us in zip(causes, parts, strict=True):
            self.bill(part_us, cause, live)
        self.stall_us += copy_us

    def bill(self, cost_us: int, cause: Cause, live: Mapping[int, BatchSequence]) -> None:
        """Charge the causer."""
        if not cost_us:
            return
        team_id = cause.team_id
        self.counts(team_id, cause.victim_team).billed_us += cost_us
        self._overheads[team_id] = self._overheads.get(team_id, 0) + cost_us
        payer = live.get(cause.for_seq)
        if payer is None or payer.request.team_id != team_id:
            payer = next((sequence for sequence in live.values() if sequence.request.team_id == team_id), None)
        if payer is None:
            self.carried_us[team_id] = self.carried_us.get(team_id, 0) + cost_us
        else:
            payer.bill.device_us += cost_us
            payer.bill.overhead_us += cost_us
            self._charged[payer.seq_id] = payer

    def charge(self, ran: Iterable[BatchSequence], charges_us: Iterable[int]) -> None:
        """The rows' own parts of a step."""
        for sequence, charge_us in zip(ran, charges_us, strict=True):
            sequence.bill.device_us += charge_us

    def settle_step(self, ran: Sequence[BatchSequence]) -> tuple[Sequence[Overhead], Sequence[BatchSequence]]:
        """The open step is billed whole: what is carried for a team goes to the first of its sequences that `ran`.

        Returns what the step cost each causer beside its rows, and the sequences that were charged without having run.
        """
        if self.carried_us:
            for sequence in ran:
                cost_us = self.carried_us.pop(sequence.request.team_id, 0)
                sequence.bill.device_us += cost_us
                sequence.bill.overhead_us += cost_us
        if not self._overheads:
            return (), ()
        overheads = [Overhead(team_id, cost_us) for team_id, cost_us in self._overheads.items()]
        for sequence in ran:
            self._charged.pop(sequence.seq_id, None)
        charged = list(self._charged.values())
        self._overheads, self._charged = {}, {}
        return overheads, charged

    def note_preemptions(self, lost: Iterable[BatchSequence], gained: Sequence[BatchSequence]) -> None:
        """These lost their slots in a step in which those gained one: each loss is put on one gain, in order. Where
        nobody gained one (a large prompt took the tokens, say) a team is its own cause.
        """
        for index, sequence in enumerate(lost):
            victim = sequence.request.team_id
            causer = gained[index % len(gained)].request.team_id if gained else victim
            self.counts(causer, victim).preemptions += 1
