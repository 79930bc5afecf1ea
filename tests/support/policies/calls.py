"""Short ways to call a policy."""

from policies.policy import Policy
from policies.sequences import SequenceTerms, Served


def arrive(policy: Policy, seq_id: int, team: int = 1, work: int = 0, start_level: int = 0) -> int:
    return policy.arrive(SequenceTerms(seq_id, team, 8, 0, work, start_level, 0), 0)


def run(policy: Policy, *costs: tuple[int, int], refuse: tuple[int, ...] = ()) -> list[int]:
    """One step in which every candidate but the refused is taken and costs what the table says (0 if nothing)."""
    table = dict(costs)
    policy.begin(0)
    order = []
    while (seq_id := policy.best()) is not None:
        if seq_id in refuse:
            policy.refuse(seq_id)
        else:
            policy.take(seq_id, 1000)
            order.append(seq_id)
    policy.settle([Served(seq_id, 1000, table.get(seq_id, 0), True) for seq_id in order], 0)
    return order
