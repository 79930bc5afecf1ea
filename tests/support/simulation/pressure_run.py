"""One seed's run under memory pressure, from its load to what was violated."""

import traceback

from tests.support.simulation.pressure import DEVICE_PERCENT, STEPS_MAX, Rig, pools, scenario_of
from tests.support.simulation.pressure_checks import Books, MoveChecks, Outcome, ShadowRunner, WatchedPolicy

ROWLESS_STEPS_MAX = 2  # beside those that wait for late copies


def run(seed: int) -> Outcome:
    """Run a seed's scenario under pressure, and check it."""
    scenario, demand, tokens = scenario_of(seed)
    device_blocks, host_blocks = pools(scenario, demand)
    outcome = Outcome(seed, scenario.mode, scenario.is_exact)
    outcome.is_floored = device_blocks * 100 > demand * DEVICE_PERCENT + 99
    policy = WatchedPolicy(scenario.constants(), outcome, lambda: rig.scheduler)
    rig = Rig(scenario, policy, mode=scenario.mode, device_blocks=device_blocks, host_blocks=host_blocks)
    runner = ShadowRunner(rig.core._runner, rig, policy, outcome)
    rig.core._runner = runner
    moves = MoveChecks(rig, policy, outcome)
    books = Books(rig, outcome, tokens)
    try:
        _drive(rig, runner, moves, books, outcome)
        books.close(policy)
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome.violate("crash", f"step {outcome.steps}: {error} ({where.filename}:{where.lineno} {where.line})")
    return outcome


def _drive(rig: Rig, runner: ShadowRunner, moves: MoveChecks, books: Books, outcome: Outcome) -> None:
    core, scheduler, scenario = rig.core, rig.scheduler, rig.scenario
    rowless = 0
    while not rig.load.is_over or core.has_work:
        runner.late = rig.load.begin_step()
        runner.plan = None
        done = core.step()
        for name in runner.late:
            core.abort(name)
        outcome.steps += 1
        try:
            scheduler.check()
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome.violate("I1", f"step {outcome.steps}: {error} ({where.line})")
        if done is not None:
            books.look(done)
        plan = runner.plan
        if plan is None:
            if scheduler.has_work:
                outcome.violate("O17", f"step {outcome.steps}: nothing can be done for {scheduler.num_live} sequences")
                return
            continue
        assert runner.result is not None
        moves.look(plan, runner.at_us)
        outcome.lost += len(runner.result.copies_failed)
        rowless = rowless + 1 if not plan.rows and scheduler.num_live else 0
        outcome.rowless_steps = max(outcome.rowless_steps, rowless)
        if rowless > ROWLESS_STEPS_MAX + 2 * scenario.max_delay:
            outcome.violate("O17", f"step {plan.step_id}: no row for {rowless} steps")
        if outcome.steps > STEPS_MAX:
            outcome.violate("O17", f"no end after {STEPS_MAX} steps")
            return
