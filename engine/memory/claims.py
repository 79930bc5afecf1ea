"""Whose KV is lost so that the holder of the reservation may start, where the claims of all others leave it none.

Claims grow with what sequences generate, and are given back only when they end. So one team's long answers could fill
both pools and hold every other team's starts. Values in, moves out, as in `engine.memory.moves`.
"""

from engine.memory.holding import Place
from engine.memory.moves import Move
from engine.memory.starts import Starts
from engine.memory.view import MemoryView
from engine.request import Sequence
from policies.policy import Policy

CUTS_MAX = 4  # a replay that was lost so often runs to its end


def make_claims_fit(starts: Starts, view: MemoryView, policy: Policy) -> list[Move]:
    """Teams that are more over-served than the holder's, and whose claims are more than their share of the blocks, drop
    KV, on either side, the most over-served team's first and of it the fewest computed tokens. Nobody does when that
    leaves no claim, or when the holder's team would have more than its own share, unless it has nothing started.

    Shares are by weight, of the teams with something live. None goes in its minimum run (G2), and the leader (G6) only
    where it cannot be done without. A replay that is under way is lost again only if its team is over the gate as seen
    from the holder's, and at most `CUTS_MAX` times before it is whole: so the holder need not wait for a long replay,
    and the replay ends. Their own team pays for the replay: it holds more than its share of the memory, and
    the holder takes no more than its own.
    """
    holder = starts.holder
    if holder is None or holder.memory.is_started:
        return []
    missing = starts.num_claimed + holder.memory.num_claim - starts.capacity
    if missing <= 0:
        return []
    team_id = holder.request.team_id
    claims = starts.claims_by_team(team_id)
    total = sum(map(starts.weight_of, claims))
    spare = {
        team: held * total - starts.capacity * starts.weight_of(team) for team, held in claims.items()
    }  # times total
    if claims[team_id] and spare[team_id] + holder.memory.num_claim * total > 0:
        return []
    order = policy.over_served(claims)
    rank = {team: place for place, team in enumerate(order[: order.index(team_id)]) if spare[team] > 0}
    if not rank:
        return []
    leader = max(view.resident.values(), key=lambda resident: (resident.work_us, -resident.seq_id), default=None)
    ahead = policy.ahead_of(rank, team_id)
    may = [
        sequence
        for sequence in (*view.resident.values(), *view.away.values())
        if sequence.request.team_id in rank
        and sequence.memory.place in (Place.DEVICE, Place.HOST)
        and (not sequence.is_half or (sequence.request.team_id in ahead and _may_cut(sequence)))
        and not sequence.memory.is_protected
    ]
    may.sort(
        key=lambda sequence: (
            sequence is leader,
            rank[sequence.request.team_id],
            sequence.num_computed,
            sequence.seq_id,
        )
    )
    chosen: list[Sequence] = []
    for sequence in may:
        if missing <= 0:
            break
        if spare[sequence.request.team_id] > 0:
            chosen.append(sequence)
            missing -= sequence.memory.num_claimed
            spare[sequence.request.team_id] -= sequence.memory.num_claimed * total
    if missing > 0:
        return []
    for sequence in chosen.copy():  # earlier ones that a later, larger one made needless
        if missing + sequence.memory.num_claimed <= 0:
            chosen.remove(sequence)
            missing += sequence.memory.num_claimed
    return [Move("drop", sequence.seq_id, sequence.request.team_id, sequence.seq_id) for sequence in chosen]


def _may_cut(sequence: Sequence) -> bool:
    """It computes lost KV again, and has not lost it too often meanwhile."""
    memory = sequence.memory
    return memory.num_computed < memory.replay_to and memory.num_cuts < CUTS_MAX
