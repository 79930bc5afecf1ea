"""What must hold at every step of a run under memory pressure, and at its end. Counts what does not, and goes on.

Checks look from outside wherever they can: plans and results are held against a shadow of both memories, charges
against the measured time, lags are the policy's own exact ones.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.blocks import blocks_for
from engine.memory.mover import Mover
from engine.memory.pools import BURST_US
from engine.plan import BlockCopy, StepPlan, StepResult
from engine.request import Sequence as BatchSequence
from engine.request import Status
from engine.step.core import EngineCore, Runner
from engine.step.scheduler import Scheduler
from engine.wire.messages import StepDone
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import AS_SERVED, Overhead, Served, Starving, StepTime
from tests.support.simulation.pressure import Rig

IDS = ("I1", "I2", "I5", "I6", "I12", "I13", "I15", "O17", "O17b", "charges", "crash")

Content = tuple[int, int, int]  # whose block, which of its blocks, how many tokens are in it


@dataclass
class Outcome:
    """One run: what was violated (how often, and the first time in words), and the figures that are published."""

    seed: int
    mode: str
    is_exact: bool
    steps: int = 0
    is_floored: bool = False  # the largest request alone needs more than a quarter of the demand
    violations: dict[str, tuple[int, str]] = field(default_factory=dict)
    gap_us: float = 0.0  # of the step whose gap was the largest part of the bound; so are the next three
    theta_us: float = 0.0
    step_us: float = 0.0  # u
    gap_of_bound: float = 0.0
    error_us: float = 0.0  # the largest error of what a team's picks would cost, over its weight
    largest_us: float = 0.0  # the most that one sequence's row and its team's overheads cost in one step
    lockout_of_bound: float = 0.0
    rowless_steps: int = 0  # the most in a row
    swaps: int = 0
    recomputes: int = 0
    forced: int = 0
    lost: int = 0
    promotions: int = 0
    starved: int = 0
    over_bound: int = 0  # of these, those that paused longer than the bound that held for them (I8): not promised here
    pause_of_bound: float = 0.0
    link_of_bound: float = 0.0
    device_us: int = 0
    forgiven_us: int = 0  # debt cut so that the band holds (I5), as cost
    lifted_us: int = 0  # credit taken from teams that could not run
    ends: dict[str, int] = field(default_factory=dict)

    def violate(self, name: str, text: str) -> None:
        """Count a violation of one of IDS."""
        count, first = self.violations.get(name, (0, text))
        self.violations[name] = count + 1, first

    @property
    def excess_in_steps(self) -> float:
        """(gap - Theta) / u."""
        return (self.gap_us - self.theta_us) / self.step_us if self.step_us else 0.0


class WatchedPolicy(EgMlfq):
    """The policy, and who was able and how far ahead after each step."""

    def __init__(self, config: PolicyConfig, outcome: Outcome, scheduler: Callable[[], Scheduler]) -> None:
        super().__init__(config)
        self._outcome = outcome
        self._scheduler = scheduler
        self.holder: int | None = None  # of the reservation, when picking began
        self.landed: dict[int, int] = {}  # steps planned when its latest minimum run began
        self._dry_us: dict[int, int] = {}  # cost of others' rows while a team was able and had none
        self.left_prompts: set[int] = set()  # teams whose prompts had used up their time in this step
        self.left_new: set[int] = set()  # teams whose new sequences waited for prompts of the team itself

    def begin(self, now_us: int) -> list[Starving]:
        self.holder = self._scheduler().memory.reserved_for
        self.left_prompts, self.left_new = set(), set()
        return super().begin(now_us)

    def leave_prompts(self, team_id: int) -> None:
        self.left_prompts.add(team_id)
        scheduler, seq_id = self._scheduler(), self.best()
        assert seq_id is not None
        least_us, left_us = time_of_row(scheduler, self, scheduler.sequences[seq_id])
        if least_us <= left_us:
            text = f"sequence {seq_id} has {left_us:.0f} us left for a row of {least_us:.0f} us and is left out"
            self._outcome.violate("I6", f"step {scheduler.num_steps}: {text}")
        super().leave_prompts(team_id)

    def leave_new(self, team_id: int) -> None:
        self.left_new.add(team_id)
        scheduler, seq_id = self._scheduler(), self.best()
        assert seq_id is not None
        halves = [one for one in scheduler.sequences.values() if one.memory.is_started and one.is_half]
        wholes = [*halves, scheduler.sequences[seq_id]]
        num_blocks = sum(blocks_for(one.num_to_fill, scheduler._config.block_size) for one in wholes)
        is_own = any(one.request.team_id == team_id for one in halves)
        if not is_own or num_blocks <= scheduler.memory.device.num_blocks * 3 // 4:
            text = f"new sequence {seq_id} is held back, with {num_blocks} blocks of half-computed prompts"
            self._outcome.violate("I6", f"step {scheduler.num_steps}: {text}")
        super().leave_new(team_id)

    def protect(self, seq_id: int, num_steps: int) -> None:
        if num_steps > self._sequences[seq_id].min_run_left:
            self.landed[seq_id] = self._scheduler().num_steps
        super().protect(seq_id, num_steps)

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        costs: dict[int, int] = {}
        for row in served:
            team_id = self._sequences[row.seq_id].team.team_id
            costs[team_id] = costs.get(team_id, 0) + row.cost_us
        expected = {team.team_id: (team.provisional // team.unit, team.weight) for team in self._taken}
        for team_id, (expected_us, weight) in expected.items():
            self._outcome.error_us = max(self._outcome.error_us, abs(costs.get(team_id, 0) - expected_us) / weight)
        row_us = max((row.cost_us for row in served), default=0)
        billed_us = max((overhead.cost_us for overhead in overheads), default=0)
        self._outcome.largest_us = max(self._outcome.largest_us, row_us + billed_us)
        super().settle(served, now_us, overheads, time)
        self._look_at_lags(costs, costs.keys() | {overhead.team_id for overhead in overheads})

    def _look_at_lags(self, costs: dict[int, int], served: set[int]) -> None:
        meter, outcome = self._meter, self._outcome
        able = [team for team in meter.active if team.is_able]
        weights = sum(team.weight for team in meter.teams.values())
        assert meter.widths is not None
        bound = meter.widths.wide  # times scale
        if len(able) > 1:
            lags = [team.lag for team in able]
            gap = max(lags) - min(lags)
            if gap / bound > outcome.gap_of_bound:
                outcome.gap_of_bound = gap / bound
                outcome.gap_us, outcome.theta_us, outcome.step_us = (
                    value / meter.scale for value in (gap, meter.widths.theta, meter.widths.step)
                )
            if gap > bound:
                text = f"gap {gap / meter.scale:.0f} of {bound / meter.scale:.0f} us"
                outcome.violate("I5", f"step {self._scheduler().num_steps}: {text}")
        dry, rows_us = self._dry_us, sum(costs.values())  # who is billed for a copy was served by it
        self._dry_us = {team.team_id: dry.get(team.team_id, 0) + rows_us for team in able if team.team_id not in served}
        longest_us = max(self._dry_us.values(), default=0)
        part = longest_us * meter.scale / (bound * weights)
        outcome.lockout_of_bound = max(outcome.lockout_of_bound, part)
        if part > 1:
            outcome.violate("O17b", f"step {self._scheduler().num_steps}: an able team had no row for {longest_us} us")


def time_of_row(scheduler: Scheduler, policy: EgMlfq, sequence: BatchSequence) -> tuple[float, float]:
    """What the least row of prompt would take that `sequence` may have now, and what is left for it in the step that is
    being picked: by the formula of `policies.prompt_time`, from the rows that were taken, with fractions. Microseconds.
    """
    config, profile, timer = scheduler._config, scheduler._profile, scheduler._timer
    team_id, start, size = sequence.request.team_id, sequence.num_computed, config.block_size
    taken = list(zip(timer._rows, timer._sequences, timer._marginals_us, strict=True))
    rows: list[tuple[int, float]] = []  # team and time of those that get a token
    prompts_us, all_us = 0.0, 0.0
    for row, one, us in taken:
        all_us += us
        is_replay = row.start < one.memory.replay_to
        if row.is_decode or (row.samples and not is_replay and one.request.team_id != team_id):
            rows.append((one.request.team_id, us))
        if not row.is_decode and not is_replay and one.request.team_id == team_id:
            prompts_us += us
    running = {row.seq_id for row, _, _ in taken}
    expected = [
        one
        for one in timer._ran_last
        if one.status in (Status.RUNNING, Status.PAUSED)
        and one.seq_id not in running
        and one.output_token_ids
        and one.num_computed >= one.memory.replay_to
    ]
    slots_left = config.max_batch_size - len(taken) - 1  # one is for the row itself
    for one in expected[:slots_left]:
        us = profile.decode_marginal_us(one.num_computed + 1)
        rows.append((one.request.team_id, us))
        all_us += us
    parts: dict[int, float] = {}
    for other, us in rows:
        parts[other] = parts.get(other, 0.0) + us + profile.fixed_us / len(rows)
    step_us = sum(parts.values())
    parts.pop(team_id, None)
    teams = policy._meter.teams
    left_us = math.inf
    if parts:
        weight, widths = teams[team_id].weight, policy._meter.widths
        assert widths is not None
        # F has what the others leave of the step at the level at which all of it is used.
        level = max(
            (step_us - sum(part for part in parts.values()) + sum(parts[t] for t in high))
            / (weight + sum(teams[t].weight for t in high))
            for high in _highest(parts, {t: teams[t].weight for t in parts})
        )
        own_us = weight * level
        lags = {t: teams[t].lag - teams[t].provisional for t in (*parts, team_id)}
        ahead = (min(lags[t] for t in parts) + widths.theta - lags[team_id]) / teams[team_id].unit
        left_us = max(0.0, step_us * own_us / (step_us - own_us) + ahead) - prompts_us
    # As much for rounding: rows and parts are whole microseconds, and a team has at most four times another's weight.
    left_us -= 5 * (len(rows) + len(parts) + 5)
    cap_us = timer._step_us_max - profile.fixed_us - all_us - len(rows) - 5
    prompt_len, chunk = len(sequence.request.prompt_token_ids), config.prefill_chunk_tokens
    tokens_left = config.max_batch_tokens - sum(len(row.token_ids) for row, _, _ in taken)
    end = min(prompt_len, (start // chunk + 1) * chunk, start + tokens_left)
    worth = math.ceil(profile.fixed_us / profile.prefill_token_us)
    block = size - start % size
    least = min(end - start, max(block, size, worth))
    row_us = profile.prefill_marginal_us(start, least)
    if not any(not row.is_decode for row, _, _ in taken):
        cap_us = max(cap_us, profile.prefill_marginal_us(start, block))
    return row_us, min(left_us, cap_us)


def _highest(parts: dict[int, float], weights: dict[int, int]) -> list[list[int]]:
    """The teams by demand over weight, the most demanding 0, 1, 2 and so on of them."""
    order = sorted(parts, key=lambda team: -parts[team] / weights[team])
    return [order[:count] for count in range(len(order) + 1)]


class ShadowRunner:
    """Holds each plan against what its blocks really contain, then runs it; knows both memories block by block."""

    def __init__(self, inner: Runner, rig: Rig, policy: WatchedPolicy, outcome: Outcome) -> None:
        self._inner, self._rig, self._policy, self._outcome = inner, rig, policy, outcome
        self._size = rig.scenario.block_size
        self._memory: tuple[dict[int, Content], dict[int, Content]] = ({}, {})  # device, host
        self._flights: dict[int, tuple[BlockCopy, bool, list[Content | None]]] = {}
        self._busy: tuple[set[int], set[int]] = (set(), set())
        self._positions: dict[tuple[int, int], int] = {}
        self.late: Sequence[str] = ()  # whom to abort within the step
        self.plan: StepPlan | None = None
        self.result: StepResult | None = None
        self.at_us = 0  # when the plan was made

    def execute(self, plan: StepPlan) -> StepResult:
        self.plan, self.at_us = plan, self._rig.clock.now_us()
        self._begin_copies(plan.copies_out, is_out=True)
        self._begin_copies(plan.copies_in, is_out=False)
        self._check_rows(plan)
        for name in self.late:
            self._rig.core.abort(name)
        self.late = ()
        self.result = result = self._inner.execute(plan)
        device = self._memory[0]
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            for index in range(row.start // self._size, blocks_for(end, self._size)):
                device[row.block_table[index]] = row.seq_id, index, min(self._size, end - index * self._size)
        for copy_id in result.copies_done:
            self._end_copy(copy_id, is_good=True)
        for copy_id in result.copies_failed:
            self._end_copy(copy_id, is_good=False)
        return result

    def release(self, seq_id: int) -> None:
        self._inner.release(seq_id)

    def _violate(self, name: str, text: str) -> None:
        assert self.plan is not None
        self._outcome.violate(name, f"step {self.plan.step_id}: {text}")

    def _begin_copies(self, copies: Iterable[BlockCopy], *, is_out: bool) -> None:
        source = 0 if is_out else 1
        for copy in copies:
            for pair in copy.pairs:
                for side, block in ((source, pair[0]), (1 - source, pair[1])):
                    if block in self._busy[side]:
                        self._violate("I2", f"block {block} is in two copies")
                    self._busy[side].add(block)
            was = [self._memory[source].get(pair[0]) for pair in copy.pairs]
            if any(content is None or content[0] != copy.seq_id for content in was):
                self._violate("I2", f"copy {copy.copy_id} moves what is not sequence {copy.seq_id}'s")
            self._flights[copy.copy_id] = copy, is_out, was

    def _end_copy(self, copy_id: int, *, is_good: bool) -> None:
        copy, is_out, was = self._flights.pop(copy_id)
        source = 0 if is_out else 1
        for (read, written), content in zip(copy.pairs, was, strict=True):
            self._busy[source].discard(read)
            self._busy[1 - source].discard(written)
            if self._memory[source].get(read) != content:
                self._violate("I2", f"block {read} was written while it was copied")
            if is_good and content is not None:
                self._memory[1 - source][written] = content
            else:
                self._memory[1 - source].pop(written, None)

    def _check_rows(self, plan: StepPlan) -> None:
        scenario, live = self._rig.scenario, self._rig.scheduler.sequences
        tokens = sum(len(row.token_ids) for row in plan.rows)
        if len(plan.rows) > scenario.slots or tokens > scenario.budget:
            self._violate("I6", f"{len(plan.rows)} rows with {tokens} tokens are too many")
        device, busy, size = self._memory[0], self._busy[0], self._size
        used: set[int] = set()
        for row in plan.rows:
            seq_id, start = row.seq_id, row.start
            end = start + len(row.token_ids)
            sequence = live.get(seq_id)
            if sequence is None:
                self._violate("I15", f"sequence {seq_id} has ended and runs")
                continue
            table = row.block_table
            if len(table) < blocks_for(end, size):
                self._violate("I2", f"sequence {seq_id} has {len(table)} blocks for {end} tokens")
            if not (busy.isdisjoint(table) and used.isdisjoint(table)):
                self._violate("I2", f"a block of sequence {seq_id} is in a copy, or another row's")
            used.update(table)
            for index in range(blocks_for(start, size)):
                owner, at, filled = device.get(table[index], (-1, -1, 0))
                if owner != seq_id or at != index or filled < min(size, start - index * size):
                    self._violate("I2", f"block {index} of sequence {seq_id} holds {filled} tokens of {owner}'s {at}")
            key = seq_id, sequence.memory.num_recomputes
            if start != self._positions.get(key, 0):
                self._violate("I12", f"sequence {seq_id} goes on at {start}, not {self._positions.get(key, 0)}")
            self._positions[key] = end
            prompt, output = sequence.request.prompt_token_ids, sequence.output_token_ids
            split = max(0, start - len(prompt))
            known = [*prompt[start:end], *output[split : max(0, end - len(prompt))]]
            if list(row.token_ids) != known or row.num_generated != len(output):
                self._violate("I12", f"sequence {seq_id} is fed other tokens than it has")
        self._check_work_conservation(plan, tokens, {row.seq_id for row in plan.rows})

    def _check_work_conservation(self, plan: StepPlan, tokens: int, ran: set[int]) -> None:
        scenario, scheduler = self._rig.scenario, self._rig.scheduler
        if len(plan.rows) == scenario.slots or tokens == scenario.budget:
            return
        free = scheduler.memory.device.num_free
        # If the holder changed, some sequences were tried beside another one.
        has_holder_changed = scheduler.memory.reserved_for != self._policy.holder
        for sequence in scheduler.sequences.values():
            if sequence.seq_id in ran:
                continue
            team_id = sequence.request.team_id
            if team_id in self._policy.left_prompts and not sequence.output_token_ids:
                continue
            if team_id in self._policy.left_new and not sequence.memory.is_started:
                continue
            if sequence.status is Status.PAUSED:
                missing = blocks_for(self._next_end(sequence), self._size) - len(sequence.memory.table.blocks)
                if missing <= free:
                    self._violate("I6", f"sequence {sequence.seq_id} needs {missing} of {free} blocks and is left out")
            elif sequence.memory.is_started or has_holder_changed:
                continue
            elif scheduler.memory._starts.fits(sequence, free):
                self._violate("I6", f"new sequence {sequence.seq_id} fits and is left out")

    def _next_end(self, sequence: BatchSequence) -> int:
        """Where its next row ends at the furthest."""
        start, chunk = sequence.num_computed, self._rig.scenario.chunk
        if not sequence.is_half:
            return start + 1
        return min(sequence.num_to_fill, (start // chunk + 1) * chunk, start + self._rig.scenario.budget)


class MoveChecks:
    """I13: bytes over the link, and who was moved out too soon after it came back."""

    def __init__(self, rig: Rig, policy: WatchedPolicy, outcome: Outcome) -> None:
        self._rig, self._policy, self._outcome = rig, policy, outcome
        self._percent = rig.scenario.link_percent
        self._used = 0  # hundredths of a microsecond of link time, of moves that were not forced
        self._least: int | None = None
        self._largest_us = 0
        self.is_forced = False
        swaps: Any = rig.scheduler.memory._mover
        if isinstance(swaps, Mover):
            carry_out, force = swaps._carry_out, swaps.force

            def checked_carry_out(*arguments: Any) -> None:
                (moves,) = [argument for argument in arguments if isinstance(argument, list)]
                self._check_victims(moves, rig.scheduler.num_steps)
                carry_out(*arguments)

            def forced(*arguments: Any, **named: Any) -> Any:
                self.is_forced = True
                return force(*arguments, **named)

            swaps._carry_out, swaps.force = checked_carry_out, forced

    def _check_victims(self, moves: Iterable[Any], num_steps: int) -> None:
        if self.is_forced:
            self._outcome.forced += 1
            return
        for move in moves:
            sequence = self._rig.scheduler.sequences[move.seq_id]
            landed = self._policy.landed.get(move.seq_id)
            if move.kind not in ("out", "drop") or sequence.status is Status.SWAPPED or landed is None:
                continue
            if num_steps - landed < self._rig.scenario.min_run_steps:
                text = (
                    f"step {num_steps}: sequence {move.seq_id} is moved {num_steps - landed} steps into its minimum run"
                )
                self._outcome.violate("I13", text)

    def look(self, plan: StepPlan, at_us: int) -> None:
        """After a step."""
        copies = (*plan.copies_out, *plan.copies_in)
        if copies and not self.is_forced:
            block_us = self._rig.scenario.block_copy_us
            times_us = [-int(-len(copy.pairs) * block_us // 1) for copy in copies]
            before = self._used - self._percent * at_us
            self._least = before if self._least is None else min(self._least, before)
            self._used += 100 * sum(times_us)
            self._largest_us = max(self._largest_us, *times_us)
            most = 100 * (BURST_US + self._largest_us)
            moved = self._used - self._percent * at_us - self._least
            self._outcome.link_of_bound = max(self._outcome.link_of_bound, moved / most)
            if moved > most:
                self._outcome.violate("I13", f"step {plan.step_id}: {moved} of {most} in a window")
        self.is_forced = False


class Books:
    """Requests end once, charges sum to the time, tokens are those of the run without pressure."""

    def __init__(self, rig: Rig, outcome: Outcome, tokens: dict[str, list[int]]) -> None:
        self._rig, self._outcome, self._expected = rig, outcome, tokens
        self._charged: dict[str, int] = {}
        self._carried = 0
        self._total_us = 0
        self._finished_us = 0
        self._ended: dict[str, str] = {}
        self._tokens: dict[str, list[int]] = {}

    def look(self, done: StepDone) -> None:
        """After a step."""
        outcome, charged = self._outcome, self._charged
        spent = 0
        for event in done.tokens:
            spent += event.device_us - charged.get(event.request_id, 0)
            charged[event.request_id] = event.device_us
            self._tokens.setdefault(event.request_id, []).extend(event.token_ids)
        carried = sum(self._rig.scheduler.memory.bills.carried_us.values())
        if spent + carried - self._carried != done.duration_us:
            text = f"step {done.step_id}: {spent} charged, {carried - self._carried} carried of {done.duration_us} us"
            outcome.violate("charges", text)
        self._carried = carried
        self._total_us += done.duration_us
        for finished in done.finished:
            name, reason = finished.request_id, finished.reason
            if name in self._ended:
                outcome.violate("I15", f"{name} ended twice")
            self._ended[name] = reason
            outcome.ends[reason] = outcome.ends.get(reason, 0) + 1
            outcome.swaps += finished.num_swaps
            outcome.recomputes += finished.num_recomputes
            outcome.promotions += finished.num_promotions
            if finished.pause_bound_us:
                outcome.starved += 1
                outcome.over_bound += finished.longest_pause_us > finished.pause_bound_us
                part = finished.longest_pause_us / finished.pause_bound_us
                outcome.pause_of_bound = max(outcome.pause_of_bound, part)
            self._finished_us += finished.device_us
            self._check_end(name, reason, finished.device_us)
            self._rig.load.ended(name)

    def _check_end(self, name: str, reason: str, device_us: int) -> None:
        outcome, call = self._outcome, self._rig.load.sent[name]
        if device_us != self._charged.get(name, 0):
            outcome.violate("charges", f"{name} ends with {device_us} us, its events say {self._charged.get(name, 0)}")
        tokens, expected = self._tokens.get(name, []), self._expected[name]
        common = min(len(tokens), len(expected))
        if tokens[:common] != expected[:common] or (reason == "length" and len(tokens) != call.output):
            outcome.violate("I12", f"{name} has other tokens than without pressure")
        is_fine = {
            "length": True,
            "abort": call.abort_after is not None,
            "timeout": call.max_queue_us > 0 and not tokens,
        }
        if not is_fine.get(reason, False):
            outcome.violate("I15", f"{name} ended with {reason}")

    def close(self, policy: WatchedPolicy) -> None:
        """At the end of the run."""
        outcome, rig = self._outcome, self._rig
        if self._ended.keys() != rig.load.sent.keys() or len(self._ended) != len(rig.scenario.calls):
            outcome.violate("I15", f"{len(self._ended)} of {len(rig.scenario.calls)} requests have ended")
        if self._finished_us + self._carried != self._total_us:
            outcome.violate("charges", f"{self._finished_us} + {self._carried} of {self._total_us} us at the end")
        served_us = sum(service.served_us for service in policy.team_service())
        if served_us != self._total_us:
            outcome.violate("charges", f"the policy booked {served_us} of {self._total_us} us")
        outcome.device_us = self._total_us
        outcome.forgiven_us, outcome.lifted_us = policy.forgiven_us
        left = leftovers(rig.core)
        if left:
            outcome.violate("I15", f"left at the end: {left}")


def leftovers(core: EngineCore) -> dict[str, int]:
    """What an engine without work still holds, by name: containers that should be empty, with their sizes."""
    scheduler = core.scheduler
    entry, memory = scheduler.memory._starts, scheduler.memory
    sizes = {
        "requests": len(core.request_ids) + len(core._seq_ids) + len(core._inbox) + len(core._ended),
        "sequences": scheduler.num_live,
        "flights": len(memory._pools.flights) + len(memory._pools._flight_of),
        "device blocks": memory.device.num_blocks - memory.device.num_free,
        "host blocks": memory.host.num_blocks - memory.host.num_free,
        "waiting": len(entry.waiting) + len(entry.waiting_of),
        "claims": entry.num_claimed + entry.num_half,
        "holder": int(entry.holder is not None),
    }
    swaps: Any = scheduler.memory._mover
    if isinstance(swaps, Mover):
        sizes["dropped"] = swaps.num_dropped
        parts = {"half": swaps.view.half, "away": swaps.view.away, "resident": swaps.view.resident}
        parts |= {"blocked": swaps.blocked, "minimum runs": swaps._min_runs, "causes": swaps._causes}
        sizes |= {name: len(part) for name, part in parts.items()}
    policy: Any = scheduler.policy
    sizes["policy sequences"] = len(policy._sequences) + len(policy._fresh) + len(policy._meter.active)
    sizes["refused"] = policy._meter.num_refused + sum(team.num_refused for team in policy._meter.teams.values())
    return {name: size for name, size in sizes.items() if size}
