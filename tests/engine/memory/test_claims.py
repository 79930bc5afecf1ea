"""Claims that leave the reservation's holder no room to start: whose KV is dropped, and for whom."""

import pytest

from engine.request import Status
from tests.support.engine.swap_bench import Bench, ran


@pytest.mark.parametrize(("mode", "host"), [("proactive", 8), ("recompute", 0)])
def test_when_a_team_has_nothing_started_it_may_exceed_its_share(mode: str, host: int) -> None:
    """Team 0 fills both pools with sequences that end late. The one request of team 1 claims more than half of all
    blocks. Were it held to its share, it would wait for the others' ends, and a team of endless work has none.
    """
    bench = Bench(blocks=32, host=host, max_batch_size=16, memory_preemption=mode)
    hogs = [bench.add(4, 120) for _ in range(8)]
    entry = bench.scheduler.memory._starts
    while entry.num_claimed + 24 <= entry.capacity:
        bench.step()
    large = bench.add(92, 4, team_id=1)
    assert large.memory.num_claim == 24 > (32 + host) / 2
    while large.status is Status.WAITING:
        bench.step()
        assert not any(one.is_finished for one in hogs), "it waits for an end"
    assert large.status is Status.RUNNING
    assert sum(one.memory.num_recomputes for one in hogs) > 0


@pytest.mark.case("K36")
def test_when_claims_give_way_they_are_as_few_as_can_be() -> None:
    """Claims of 1, 1 and 3 blocks, and 3 are missing: the two small ones are chosen first, and then not needed."""
    bench = Bench(blocks=8, host=0, block_size=32, max_batch_size=1, memory_preemption="recompute")
    sizes = {1: (4, 28), 2: (5, 27), 3: (70, 26)}  # prompt and output tokens, by seq_id
    runner = bench.add(33, 31, team_id=2)  # 2 blocks, and 31 steps
    bench.step(), bench.step()
    for seq_id, (prompt, output) in sizes.items():
        assert bench.add(prompt, output).seq_id == seq_id
        bench.policy.order = [seq_id]
        assert ran(bench.step()) == [seq_id]
    assert [bench.scheduler.sequences[seq_id].memory.num_claimed for seq_id in range(4)] == [2, 1, 1, 3]
    newcomer = bench.add(100, 28, team_id=1)
    assert newcomer.memory.num_claim == 4
    bench.policy.order = [newcomer.seq_id, runner.seq_id]
    bench.until(newcomer, Status.RUNNING)
    recomputes = {seq_id: bench.scheduler.sequences[seq_id].memory.num_recomputes for seq_id in range(4)}
    assert recomputes == {0: 0, 1: 0, 2: 0, 3: 1}
