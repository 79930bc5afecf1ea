"""An exception in a step ends the request that causes it, whatever its kind, and no other request notices."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.plan import BlockCopy, Row, StepPlan, StepResult
from engine.wire.messages import Refused, SamplingParams
from tests.engine.step.test_core import ends, watched
from tests.support.engine.poison import POISON_SEED, POISON_TOKEN, RAISED, Poison
from tests.support.engine.simple_engine import ArrivalOrder, Engine, submit
from tests.support.engine.swap_engine import SwapEngine
from tests.support.engine.torch_schedules import Job, Progress, RecordingRunner, make_runner, random_jobs, row_of

GREEDY = SamplingParams(temperature=0.0)
PLACES = ("prefill", "decode", "sampling")
EXCEPTIONS = pytest.mark.parametrize("make", RAISED, ids=lambda make: type(make()).__name__ + str(make())[:1])


@pytest.fixture(scope="module")
def shared_runner(tiny_path: Path) -> RecordingRunner:
    return make_runner(tiny_path, torch.float32, num_host_blocks=8, native=False)


@pytest.fixture
def runner(shared_runner: RecordingRunner) -> Iterator[RecordingRunner]:
    yield shared_runner
    shared_runner._spoiled.clear()


def good_rows(runner: RecordingRunner, count: int) -> list[Row]:
    """Half of them decode; their KV is in the cache."""
    rows: list[Row] = []
    for i in range(count):
        sampling = GREEDY if i % 3 else SamplingParams(temperature=0.9, seed=i)
        progress = Progress(Job(tuple(range(10 + i, 30 + i)), 2, sampling), blocks=[2 * i, 2 * i + 1])
        row = row_of(progress, i, 100)
        if i % 2:
            progress.output.append(runner.execute(StepPlan(0, (row,))).token_ids[i])
            progress.computed = len(progress.job.prompt)
            row = row_of(progress, i, 100)
        rows.append(row)
    return rows


def bad_row(place: str, seq_id: int = 99, block: int = 60) -> Row:
    row = Row(seq_id, False, 0, (40, 41, 42), (block,), True, GREEDY, 0)
    if place == "prefill":
        return msgspec.structs.replace(row, token_ids=(40, POISON_TOKEN, 42))
    if place == "decode":
        return msgspec.structs.replace(row, is_decode=True, start=3, token_ids=(POISON_TOKEN,), num_generated=1)
    return msgspec.structs.replace(row, sampling=SamplingParams(seed=POISON_SEED))


@pytest.mark.case("T01")
@EXCEPTIONS
@pytest.mark.parametrize("place", PLACES)
def test_a_row_that_raises_fails_alone(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Exception], place: str
) -> None:
    rows = good_rows(runner, 7)
    expected = runner.execute(StepPlan(1, tuple(rows)))
    poison = Poison(monkeypatch, runner.model, make)
    for at in (0, 3, 7):
        poison.num_forwards = 0
        result = runner.execute(StepPlan(2, (*rows[:at], bad_row(place), *rows[at:])))
        assert result.token_ids == expected.token_ids
        (reason,) = result.failed.values()
        assert reason.startswith(type(make()).__name__) and "\n" not in reason
        assert list(result.blamed_us) == [99]
        assert poison.num_forwards <= 2 * 3 + 2, "three halvings of eight rows, and a look at the device"
    alone = runner.execute(StepPlan(3, (bad_row(place),)))
    assert (list(alone.failed), alone.token_ids) == ([99], {})
    assert runner.execute(StepPlan(4, tuple(rows))).token_ids == expected.token_ids


@pytest.mark.case("T01")
@pytest.mark.parametrize("num_bad", [2, 5, 8])
def test_several_rows_that_raise_fail_within_a_bound(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch, num_bad: int
) -> None:
    rows = good_rows(runner, 8)
    expected = runner.execute(StepPlan(1, tuple(rows))).token_ids
    poison = Poison(monkeypatch, runner.model, lambda: IndexError("x"))
    for seed in range(6):
        mixed = [*rows, *(bad_row("prefill", 100 + i, 40 + i) for i in range(num_bad))]
        random.Random(seed).shuffle(mixed)
        poison.num_forwards = 0
        result = runner.execute(StepPlan(1, tuple(mixed)))
        assert result.token_ids == expected
        assert sorted(result.failed) == [100 + i for i in range(num_bad)] == sorted(result.blamed_us)
        assert poison.num_forwards <= 2 * len(mixed) - 1 + 1
        assert result.num_raised >= num_bad


@pytest.mark.case("T01")
def test_memory_short_for_many_rows_but_not_for_few(runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = good_rows(runner, 8)
    expected = runner.execute(StepPlan(1, tuple(rows))).token_ids
    forward = runner.model.forward
    alive: list[None] = []

    class Held:
        """Memory that a failed attempt holds through the frames of its exception."""

        def __init__(self) -> None:
            alive.append(None)

        def __del__(self) -> None:
            alive.pop()

    def short(batch: Any, *args: Any) -> torch.Tensor:
        assert not alive, "an attempt before this one still holds its tensors"
        held = Held()
        if len(batch.decode) + len(batch.prefill) > 3:
            raise torch.OutOfMemoryError("out of memory")
        del held
        return forward(batch, *args)

    monkeypatch.setattr(runner.model, "forward", short)
    result = runner.execute(StepPlan(1, tuple(rows)))
    assert (result.token_ids, result.failed, result.blamed_us) == (expected, {}, {})
    assert result.num_raised == 3, "eight rows, and four twice"


@pytest.mark.case("T01")
@EXCEPTIONS
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_broken_device_ends_the_engine_at_once(
    runner: RecordingRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Exception],
    num_rows: int,
) -> None:
    rows = good_rows(runner, num_rows)
    poison = Poison(monkeypatch, runner.model, make)
    poison.is_broken = True
    with pytest.raises(type(make())):
        runner.execute(StepPlan(1, tuple(rows)))
    assert poison.num_forwards <= 5, "down to one row, and a look at the device"
    assert "the device is broken" in caplog.text and "Traceback" in caplog.text


@pytest.mark.case("T01")
def test_a_failed_assertion_is_no_row_s_fault(runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = good_rows(runner, 4)
    poison = Poison(monkeypatch, runner.model, lambda: AssertionError("free + used = total"))
    with pytest.raises(AssertionError, match="free"):
        runner.execute(StepPlan(1, (*rows, bad_row("prefill"))))
    assert poison.num_forwards == 1


@pytest.mark.case("T01")
def test_a_failure_is_one_record_with_its_traceback(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Poison(monkeypatch, runner.model, lambda: ValueError("said by the model"))
    with caplog.at_level(logging.ERROR):
        runner.execute(StepPlan(5, (*good_rows(runner, 3), bad_row("prefill"))))
    (record,) = caplog.records
    assert record.getMessage() == "step 5: sequence 99 fails alone"
    assert "Traceback" in caplog.text and "ValueError: said by the model" in caplog.text


@pytest.mark.case("T01")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_requests_beside_a_poisoned_one_keep_their_tokens(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, native: bool
) -> None:
    """Through core, scheduler and swapping: with poisoned requests in the mix the others are as without them."""

    def play(jobs: Sequence[Job], token: int) -> SwapEngine:
        runner = make_runner(
            tiny_path, torch.float32, num_blocks=12, max_batch_tokens=128, num_host_blocks=24, native=native
        )
        with monkeypatch.context() as patch:
            poison = Poison(patch, runner.model, lambda: IndexError("index 512 is out of bounds"))
            poison.is_on, poison.token = token >= 0, token
            engine = SwapEngine(runner)
            engine.run(jobs)
        return engine

    jobs = random_jobs(random.Random(7), 9, vocab=400, max_prompt=60, max_output=24)
    if place == "sampling":
        for i in (2, 5):
            jobs[i] = Job(jobs[i].prompt, 24, SamplingParams(seed=POISON_SEED))
    elif place == "prefill":
        for i in (2, 5):
            jobs[i] = Job((*jobs[i].prompt, POISON_TOKEN, 7), 24, jobs[i].sampling)
    base = play(jobs, -1)
    # In decode the poison is a token that two of them generate, and feed in a later step.
    token = base.ids["2"][1] if place == "decode" else POISON_TOKEN
    fed = [{*jobs[i].prompt, *base.ids[str(i)][:-1]} for i in range(9)]
    bad = {str(i) for i in range(9) if token in fed[i] or jobs[i].sampling.seed == POISON_SEED}
    assert "2" in bad and len(bad) <= 6
    engine = play(jobs, token)
    assert {i for i, finished in engine.finished.items() if finished.reason == "error"} == bad
    for i in base.ids.keys() - bad:
        assert engine.ids[i] == base.ids[i], f"request {i} noticed"
    engine.check_empty()


@pytest.mark.case("T01")
def test_what_a_failed_row_cost_is_paid_by_its_request() -> None:
    engine, runner = watched(blocks=64)
    execute = runner.execute

    def failing(plan: StepPlan) -> StepResult:
        result = execute(plan)
        failed = {row.seq_id: "ValueError: no" for row in plan.rows if row.seq_id == 1 and row.is_decode}
        runner.clock.advance(5_000 * len(failed))
        return StepResult(
            plan.step_id,
            result.duration_us + 5_000 * len(failed),
            result.token_ids,
            failed,
            blamed_us=dict.fromkeys(failed, 5_000),
            num_raised=3 * len(failed),
        )

    runner.execute = failing  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        engine.core.add(submit(name, prompt=10, output=4, team_id=ord(name) - 97))
    done = engine.run()
    assert ends(done) == {"a": "length", "b": "error", "c": "length"}
    by_id = {finished.request_id: finished for message in done for finished in message.finished}
    assert sum(finished.device_us for finished in by_id.values()) == sum(message.duration_us for message in done)
    assert by_id["a"].device_us == by_id["c"].device_us == 100 + 3 * 1000, "what they cost without it"
    assert by_id["b"].device_us == 100 + 1000 + 5_000
    assert by_id["b"].message == "ValueError: no"
    assert engine.scheduler.memory.bills.num_raised == 3


@pytest.mark.case("T01")
@pytest.mark.parametrize("fails", ["copies", "canary", "check"])
def test_copies_that_raise_are_given_up_and_named(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    class Canary:
        def start(self, *_: Any) -> None:
            if fails == "canary":
                raise MemoryError

        def done(self, *_: Any) -> dict[int, str]:
            raise RuntimeError("out of memory")

        def forget(self, seq_id: int) -> None:
            pass

    rows = good_rows(runner, 2)
    expected = runner.execute(StepPlan(1, tuple(rows))).token_ids
    if fails == "copies":
        monkeypatch.setattr("engine.device.copy_engine.copy_blocks", lambda *_: [][0])
    else:
        monkeypatch.setattr(runner, "canary", Canary())
    plan = StepPlan(2, tuple(rows), (BlockCopy(5, 50, ((9, 0),)),), (BlockCopy(6, 51, ((4, 11),)),))
    result = runner.execute(plan)
    assert (list(result.copies_done), list(result.copies_failed)) == ([], [5, 6])
    assert result.token_ids == expected and not result.failed
    monkeypatch.undo()
    assert runner.execute(StepPlan(3, tuple(rows))).copies_done == [], "none of them is named twice"


class Picky(ArrivalOrder):
    """Cannot take in a sequence of 13 tokens."""

    make: Callable[[], BaseException] = staticmethod(lambda: ValueError("thirteen"))

    def arrive(self, sequence: Any, now_us: int) -> int:
        if sequence.prompt_len == 13:
            raise type(self).make()
        return super().arrive(sequence, now_us)


@pytest.mark.case("T01")
@EXCEPTIONS
def test_a_request_whose_arrival_raises_ends_alone(make: Callable[[], Exception]) -> None:
    policy = type("Policy", (Picky,), {"make": staticmethod(make)})()
    engine = Engine(policy=policy)
    for name, prompt in (("a", 5), ("bad", 13), ("b", 6)):
        assert engine.core.add(submit(name, prompt=prompt)) is None
    done = engine.run()
    assert ends(done) == {"a": "length", "bad": "error", "b": "length"}
    finished = next(one for message in done for one in message.finished if one.request_id == "bad")
    assert finished.message.startswith(type(make()).__name__) and finished.device_us == 0
    assert engine.core.request_ids == frozenset() and engine.core.add(submit("bad")) is None
    assert ends(engine.run()) == {"bad": "length"}


def test_an_arrival_that_raises_alone_is_told_without_a_step() -> None:
    engine = Engine(policy=Picky())
    engine.core.add(submit("bad", prompt=13))
    assert ends(engine.run()) == {"bad": "error"}
    assert engine.scheduler.num_steps == 0 and not engine.core.has_work


@pytest.mark.case("T01")
def test_an_assertion_at_an_arrival_ends_the_engine() -> None:
    policy = type("Policy", (Picky,), {"make": staticmethod(lambda: AssertionError("books"))})()
    engine = Engine(policy=policy)
    engine.core.add(submit("bad", prompt=13))
    with pytest.raises(AssertionError, match="books"):
        engine.run()


@pytest.mark.case("T01")
def test_a_message_that_cannot_be_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def failing(*_: Any) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr("engine.step.core.sampling_fault", failing)
    refused = engine.core.add(submit("bad"))
    assert isinstance(refused, Refused) and refused.code == "engine_error"
    monkeypatch.undo()
    assert engine.core.request_ids == frozenset()
    assert engine.core.add(submit("bad")) is None
    assert ends(engine.run()) == {"bad": "length"}
