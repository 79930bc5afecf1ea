"""The core on a virtual clock: the inbox, refusals, timeouts, aborts in every state, and that all ends once."""

import itertools

import pytest

from engine.clock import VirtualClock
from engine.plan import StepPlan, StepResult
from engine.sim.runner import SimRunner
from engine.wire.messages import ConfigureTeams, Refused, StepDone, Submit
from tests.support.engine.simple_engine import UNIT_PROFILE, Engine, submit, team


class WatchingRunner:
    """Runs plans in simulation, keeps them, and does what a test asks in the middle of a given step."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.inner = SimRunner(UNIT_PROFILE, self.clock)
        self.plans: list[StepPlan] = []
        self.released: list[int] = []
        self.during: dict[int, object] = {}
        self.fail: dict[int, str] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        action = self.during.get(plan.step_id)
        if callable(action):
            action()
        result = self.inner.execute(plan)
        failed = {row.seq_id: self.fail[row.seq_id] for row in plan.rows if row.seq_id in self.fail}
        return StepResult(plan.step_id, result.duration_us, result.token_ids, failed)

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


def watched(**kwargs: object) -> tuple[Engine, WatchingRunner]:
    runner = WatchingRunner()
    return Engine(runner=runner, clock=runner.clock, **kwargs), runner  # type: ignore[arg-type]


def ends(done: list[StepDone]) -> dict[str, str]:
    pairs = [(finished.request_id, finished.reason) for message in done for finished in message.finished]
    assert len(pairs) == len(dict(pairs)), "a request ended twice"
    return dict(pairs)


def test_one_request_from_submit_to_end() -> None:
    engine = Engine()
    assert engine.core.add(submit("a", prompt=20, output=3)) is None
    done = engine.run()
    assert [len(event.token_ids) for message in done for event in message.tokens] == [1, 1, 1]
    (finished,) = done[-1].finished
    assert finished.reason == "length" and finished.prompt_tokens == 20 and finished.output_tokens == 3
    assert finished.device_us == sum(message.duration_us for message in done) == 20 * 10 + 2 * 1000
    assert finished.queued_us == 0 and finished.first_token_us == 200 and finished.total_us == 2200
    assert finished.level_path == (0,) and finished.num_preemptions == 0
    assert not engine.core.has_work and engine.core.step() is None


def test_without_work_a_new_table_of_teams_is_no_event() -> None:
    engine = Engine()
    assert engine.core.has_work
    assert engine.core.step() is None
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (submit("x", team_id=9), "invalid_request", "team 9 is not configured"),
        (submit("x", prompt=1024), "context_length_exceeded", "1024 tokens"),
        (submit("x", output=0), "invalid_request", "max_tokens must be at least 1"),
        (submit("x", temperature=-0.1), "invalid_request", "temperature"),
        (submit("x", temperature=float("nan")), "invalid_request", "temperature"),
        (submit("x", top_p=0.0), "invalid_request", "top_p"),
        (submit("x", top_p=1.5), "invalid_request", "top_p"),
        (submit("x", top_k=-1), "invalid_request", "top_k"),
        (submit("x", output=4, min_tokens=5), "invalid_request", "min_tokens"),
    ],
)
def test_refusals_say_why_and_leave_no_trace(message: Submit, code: str, words: str) -> None:
    engine = Engine(blocks=100)
    engine.core.step()
    refused = engine.core.add(message)
    assert refused is not None and refused.code == code and words in refused.message
    assert not engine.core.has_work and engine.core.request_ids == frozenset()
    assert engine.core.add(submit("x")) is None, "the id is free"


@pytest.mark.case("K66")
def test_a_prompt_beyond_the_context_is_refused_before_it_queues() -> None:
    engine = Engine(blocks=100, context_len=64)
    assert engine.core.add(submit("fits", prompt=63, output=1)) is None
    refused = engine.core.add(submit("x", prompt=64, output=1))
    assert refused is not None and refused.code == "context_length_exceeded"


@pytest.mark.case("K24")
def test_output_beyond_the_pool_ends_with_length() -> None:
    engine = Engine(blocks=4, block_size=16)
    refused = engine.core.add(submit("x", prompt=64, output=1))
    assert refused is not None and refused.code == "context_length_exceeded" and "at most 64 fit" in refused.message
    assert engine.core.add(submit("a", prompt=60, output=100)) is None
    (finished,) = engine.run()[-1].finished
    assert finished.reason == "length" and finished.output_tokens == 4 and finished.num_preemptions == 0


@pytest.mark.case("K64")
def test_max_tokens_beyond_the_context_is_clamped() -> None:
    engine = Engine(blocks=100, context_len=64)
    assert engine.core.add(submit("a", prompt=60, output=10**6, min_tokens=10)) is None
    (finished,) = engine.run()[-1].finished
    assert finished.reason == "length" and finished.output_tokens == 4


@pytest.mark.case("K65", "K68")
def test_empty_prompts_and_foreign_token_ids_are_refused() -> None:
    engine = Engine()
    sampling = submit("x").sampling
    for prompt in ((), (1, 256), (-1,), (2**40,)):
        refused = engine.core.add(Submit(request_id="x", team_id=0, prompt_token_ids=prompt, sampling=sampling))
        assert refused is not None and refused.code == "invalid_request"
    assert engine.core.add(submit("x")) is None and ends(engine.run()) == {"x": "length"}


@pytest.mark.case("K47")
def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    engine = Engine()
    assert engine.core.add(submit("same", output=3)) is None
    refused = engine.core.add(submit("same", output=9))
    assert refused is not None and refused.code == "invalid_request" and "in use" in refused.message
    engine.core.step()
    assert engine.core.add(submit("same")) is not None, "also while it runs"
    assert ends(engine.run()) == {"same": "length"}
    assert engine.core.add(submit("same")) is None, "free again once it has ended"


def test_the_queue_is_bounded_and_counts_only_what_has_not_started() -> None:
    engine = Engine(max_queued_requests=3, max_batch_size=2, blocks=4)
    for index in range(3):
        assert engine.core.add(submit(f"r{index}", prompt=16, output=16)) is None
    refused = engine.core.add(submit("x"))
    assert refused is not None and refused.code == "queue_full" and "3 requests" in refused.message
    engine.core.step()  # two of them started
    assert engine.core.add(submit("x", prompt=16, output=16)) is None
    assert engine.core.add(submit("y", prompt=16, output=16)) is None
    assert isinstance(engine.core.add(submit("z")), Refused)
    assert set(ends(engine.run())) == {"r0", "r1", "r2", "x", "y"}


def test_when_a_team_floods_the_queue_is_full_for_it_alone() -> None:
    engine = Engine(max_queued_requests=12, max_batch_size=1)
    names = (f"r{number}" for number in itertools.count())

    def taken(team_id: int, tries: int) -> int:
        answers = [engine.core.add(submit(next(names), team_id=team_id)) for _ in range(tries)]
        assert all(answer is None or answer.code == "queue_full" for answer in answers)
        return answers.count(None)

    assert taken(0, 100) == 12
    assert taken(1, 100) == 6, "half of it, though the first has all"
    assert taken(2, 100) == 4 and taken(3, 100) == 3
    assert taken(0, 100) == 0
    done = engine.run()
    assert len(ends(done)) == 25
    assert taken(1, 100) == 12, "alone again"


def test_only_a_request_that_has_not_started_times_out() -> None:
    engine = Engine(max_batch_size=1)
    engine.core.add(submit("long", output=10, max_queue_us=1))
    engine.core.add(submit("late", max_queue_us=2500))
    engine.core.add(submit("patient", max_queue_us=10_000_000))
    done = engine.run()
    assert ends(done) == {"long": "length", "late": "timeout", "patient": "length"}
    late = next(f for m in done for f in m.finished if f.request_id == "late")
    assert late.queued_us == late.total_us and 2500 <= late.total_us <= 3500
    assert late.output_tokens == 0 and late.device_us == 0 and late.first_token_us == 0


def test_timeouts_are_noticed_when_nothing_else_is_left() -> None:
    engine = Engine()
    engine.core.add(submit("late", max_queue_us=5))
    engine.clock.advance(10)
    (message,) = engine.run()
    assert message.finished[0].reason == "timeout" and message.duration_us == 0 and message.num_running == 0


def test_old_deadlines_do_not_pile_up() -> None:
    engine = Engine(max_batch_size=8)
    for index in range(400):
        engine.core.add(submit(f"r{index}", output=1, max_queue_us=10**12))
        if index % 8 == 7:
            engine.run()
    assert len(engine.scheduler.memory._starts._deadlines) <= 2 * 8 + 64


@pytest.mark.case("K43")
def test_requests_aborted_while_queued_never_run() -> None:
    engine, runner = watched(max_batch_size=1)
    for index in range(50):
        engine.core.add(submit(f"dead{index}"))
    engine.core.add(submit("alive", output=2))
    for index in range(50):
        engine.core.abort(f"dead{index}")
    done = engine.run()
    assert {row.seq_id for plan in runner.plans for row in plan.rows} == {50}
    assert ends(done) == {**{f"dead{i}": "abort" for i in range(50)}, "alive": "length"}


@pytest.mark.case("K40", "I15")
@pytest.mark.parametrize("cut", range(14))
def test_after_an_abort_the_next_plan_has_its_blocks_back(cut: int) -> None:
    """One victim with a chunked prefill of 6 steps, then decode; the abort lands in the middle of step `cut`."""
    engine, runner = watched(blocks=40, prefill_chunk_tokens=16)
    engine.core.add(submit("victim", prompt=90, output=20))
    engine.core.add(submit("other", prompt=3, output=30))
    runner.during[cut] = lambda: engine.core.abort("victim")
    done: list[StepDone] = []
    for _ in range(cut + 1):
        message = engine.core.step()
        assert message is not None
        done.append(message)
    assert 0 in {row.seq_id for row in runner.plans[-1].rows}, "it ran in the step the abort fell into"
    message = engine.core.step()
    assert message is not None and message.finished[0].reason == "abort"
    assert [row.seq_id for row in runner.plans[-1].rows] == [1]
    assert engine.scheduler.memory.device.num_owned == len(engine.scheduler.sequences[1].memory.table.blocks)
    assert runner.released == [0]
    assert ends([message, *engine.run()]) == {"victim": "abort", "other": "length"}
    assert engine.scheduler.memory.device.num_free == 40


@pytest.mark.case("K45")
def test_an_aborted_request_reports_abort_and_what_it_cost_so_far() -> None:
    engine = Engine()
    engine.core.add(submit("a", prompt=10, output=9))
    engine.core.step()
    engine.core.step()
    engine.core.abort("a")
    message = engine.core.step()
    assert message is not None
    (finished,) = message.finished
    assert finished.reason == "abort" and finished.output_tokens == 2 and finished.device_us == 100 + 1000
    assert message.duration_us == 0 and message.tokens == ()


def test_aborts_of_unknown_and_of_just_ended_requests_are_ignored() -> None:
    engine = Engine()
    engine.core.abort("never")
    engine.core.add(submit("a", output=1))
    assert ends(engine.run()) == {"a": "length"}
    engine.core.abort("a")
    assert engine.run() == []


@pytest.mark.case("K44")
def test_nothing_is_left_after_a_thousand_aborts() -> None:
    engine = Engine(blocks=30, max_batch_size=8)
    reasons: dict[str, str] = {}
    for index in range(1000):
        engine.core.add(submit(f"r{index}", prompt=1 + index % 40, output=5))
        if index % 3 == 0:
            message = engine.core.step()
            reasons.update(ends([message] if message else []))
        engine.core.abort(f"r{max(0, index - index % 7)}")
        engine.core.abort(f"r{index}")
    reasons.update(ends(engine.run()))
    assert len(reasons) == 1000 and "abort" in reasons.values()
    memory = engine.scheduler.memory
    assert engine.scheduler.num_live == memory.num_waiting == memory.device.num_owned == 0
    assert engine.core.request_ids == frozenset() and not engine.core._seq_ids
    assert not engine.scheduler.policy.live  # type: ignore[attr-defined]


@pytest.mark.case("K35")
def test_a_row_that_fails_in_the_runner_ends_its_request_only() -> None:
    engine, runner = watched()
    for name in ("a", "b", "c"):
        engine.core.add(submit(name, output=4))
    runner.during[2] = lambda: runner.fail.update({1: "allocation of 3 MiB failed"})
    done = engine.run()
    assert ends(done) == {"a": "length", "b": "error", "c": "length"}
    failed = next(f for m in done for f in m.finished if f.reason == "error")
    assert failed.message == "allocation of 3 MiB failed" and failed.output_tokens == 2
    assert runner.released == [1, 0, 2]


def test_a_team_that_vanishes_is_refused_but_its_requests_go_on() -> None:
    engine = Engine()
    engine.core.add(submit("a", team_id=2, output=3))
    engine.core.configure(ConfigureTeams(teams=(team(0),)))
    refused = engine.core.add(submit("b", team_id=2))
    assert refused is not None and "team 2" in refused.message
    assert ends(engine.run()) == {"a": "length"}


def test_four_sequences_of_one_prompt_all_end_in_a_full_pool() -> None:
    engine = Engine(blocks=8, block_size=4, max_batch_size=3)
    for index in range(4):
        engine.core.add(submit(f"choice{index}", prompt=6, output=6, seed=index, start_level=index % 2))
    done = engine.run()
    assert ends(done) == {f"choice{i}": "length" for i in range(4)}
    assert max(message.num_running for message in done) == 2


def test_counts_in_a_step_message() -> None:
    engine = Engine(max_batch_size=2)
    for index in range(5):
        engine.core.add(submit(f"r{index}", prompt=17, output=2))
    message = engine.core.step()
    assert message is not None
    assert (message.num_running, message.num_waiting, message.num_free_blocks) == (2, 3, 24 - 4)
    assert message.step_id == 0


def test_messages_take_effect_in_the_order_they_came() -> None:
    engine = Engine()
    engine.core.abort("a")
    engine.core.add(submit("a", output=1))
    assert ends(engine.run()) == {"a": "length"}, "an abort does not reach a later request of the same id"
