"""Who pays for copies, replays and lost slots, sequence by sequence and team by team."""

from engine.request import Status
from tests.support.engine.swap_bench import STEP_US, Bench, dropped_pair, ran


def test_a_replay_costs_its_victim_nothing_and_its_causer_all_of_it() -> None:
    bench, first, second = dropped_pair()
    work_us, device_us, overhead_us = second.work_us, second.bill.device_us, first.bill.overhead_us
    plan = bench.plan()
    while 1 not in ran(plan):
        bench.apply(plan)
        plan = bench.plan()
    bench.apply(plan)
    assert (second.work_us, second.bill.device_us, second.bill.overhead_us) == (work_us, device_us, 0)
    counts = bench.scheduler.memory.bills.take_counts()[0, 1]
    assert counts.recomputes == 1 and counts.billed_us > 0 and bench.scheduler.memory.bills.replayed_tokens == 8
    assert first.is_finished and first.bill.overhead_us == overhead_us, "it has ended, so its team carries it"
    assert bench.scheduler.memory.bills.carried_us == {0: counts.billed_us} == bench.policy.overhead_us
    late = bench.add(1, 1)
    bench.until(late, Status.FINISHED)
    assert late.bill.overhead_us >= counts.billed_us and bench.scheduler.memory.bills.carried_us == {}


def test_copy_time_is_billed_by_blocks_to_who_made_room() -> None:
    bench = Bench(blocks=6, host=6, max_batch_size=2)
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    plan = bench.plan()
    while not plan.copies_out:
        bench.apply(plan)
        plan = bench.plan()
    before_us = first.bill.device_us
    outcome = bench.apply(plan, copy_us=300)
    assert plan.rows == () and first.bill.device_us == before_us + STEP_US, "nothing ran: all of it was the copy's"
    assert [(event.request_id, event.token_ids) for event in outcome.events] == [("r0", ())]
    assert first.bill.overhead_us == STEP_US and second.bill.overhead_us == 0
    while not plan.copies_in:
        device_us = {s.seq_id: s.bill.device_us for s in (first, second)}
        plan = bench.plan()
        copy_us = 400 if plan.copies_in else 0
        bench.apply(plan, copy_us=copy_us)
    assert second.bill.device_us == device_us[1], "the way back is not its bill"
    assert bench.scheduler.memory.bills.stall_us == STEP_US + (400 if plan.rows else STEP_US)
    counts = bench.scheduler.memory.bills.take_counts()
    assert counts[0, 1].swaps_out == counts[0, 1].swaps_in == 1
    assert counts[0, 1].blocks_out == counts[0, 1].blocks_in == 3
    while bench.scheduler.num_live:
        bench.step()
    carried_us = sum(bench.scheduler.memory.bills.carried_us.values())
    assert first.bill.device_us + second.bill.device_us + carried_us == bench.total_us
    assert sum(bench.policy.charged_us.values()) + sum(bench.policy.overhead_us.values()) == bench.total_us


def test_a_lost_slot_is_put_on_who_gained_one() -> None:
    bench = Bench(blocks=20, max_batch_size=1)
    one = bench.add(1, 9)
    bench.step()
    other = bench.add(1, 9, team_id=2)
    bench.policy.order = [1, 0]
    bench.step()
    assert one.num_preemptions == 1 and other.num_preemptions == 0
    counts = bench.scheduler.memory.bills.take_counts()
    assert {pair: found.preemptions for pair, found in counts.items()} == {(2, 0): 1}
