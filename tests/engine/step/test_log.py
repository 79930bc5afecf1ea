"""The step log: what a line says, where its files end, and that nothing about it can stop the engine."""

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.blocks import BlockPool, BlockTable
from engine.memory.holding import Holding
from engine.memory.pools import KVMemory
from engine.plan import BlockCopy, Row, StepPlan, StepResult
from engine.request import Request, Sequence
from engine.step.log import StepLog, StepLogError, StepLogStart
from engine.wire.messages import Abort, ConfigureTeams, SamplingParams
from tests.support.engine.simple_engine import Engine, submit, team

START = StepLogStart(engine_id="eng-1", epoch=3, num_device_blocks=24, num_host_blocks=8, block_size=16)
SECRET = 54321  # a token id that must not be found in any file


def open_log(path: Path, bytes_max: int = 1 << 20, said: list[str] | None = None) -> StepLog:
    tell = (said if said is not None else []).append
    return StepLog(path, bytes_max, START, tell, moment=lambda: (77, 1_772_357_400_250_000))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(log: StepLog) -> Engine:
    """A simulated engine that writes this log."""
    engine = Engine()
    engine.core._step_log = log
    return engine


def scheduler(live: dict[int, Sequence], num_owned: int = 0) -> Any:
    """What the log reads of a scheduler."""
    memory = KVMemory(24, 8)
    memory.device.allocate(num_owned)
    policy = SimpleNamespace(num_promotions=lambda seq_id: 2 if seq_id == 2 else 0)
    return SimpleNamespace(sequences=live, memory=memory, policy=policy)


def request(request_id: str, team_id: int = 2) -> Request:
    return Request(request_id, team_id, 0, (SECRET,) * 40, SamplingParams(max_tokens=4), arrival_us=5)


class Table:
    """Two live sequences and the plan of one step, with everything a plan can have in it."""

    def __init__(self) -> None:
        pool = BlockPool(24)
        self.live = {
            seq_id: Sequence(seq_id, request(name), Holding(BlockTable(pool, 16), 3), 0)
            for seq_id, name in enumerate(("new", "old", "lost", "out", "in"))
        }
        sampling = SamplingParams()

        def row(seq_id: int, start: int, num: int, num_generated: int, is_decode: bool = False) -> Row:
            return Row(seq_id, is_decode, start, (SECRET,) * num, (), False, sampling, num_generated)

        self.plan = StepPlan(
            7,
            (row(0, 0, 16, 0), row(1, 40, 1, 3, is_decode=True), row(2, 16, 20, 5)),
            (BlockCopy(11, 3, ((0, 5), (1, 6))),),
            (BlockCopy(12, 4, ((7, 2),)),),
        )
        self.result = StepResult(7, 5210, {1: SECRET}, copies_done=(11, 9), copies_failed=(13,))


def test_a_line_says_what_ran_and_what_ended_and_no_token(tmp_path: Path) -> None:
    log, table = open_log(tmp_path / "steps"), Table()
    log.took(ConfigureTeams(teams=(team(1), team(2))))
    log.took(request("new"))
    log.took(Abort(request_id="nobody"))
    ended = table.live.pop(1)
    ended.finish_reason = "stop"
    ended.level, ended.num_promotions = 3, 1
    log.write(99, table.plan, table.result, [ended], scheduler(table.live, num_owned=4))
    log.close()
    start, line = read(tmp_path / "steps")
    assert start == {
        "event": "start",
        "at_us": 77,
        "wall_time": "2026-03-01T09:30:00.250000Z",
        "engine_id": "eng-1",
        "epoch": 3,
        "num_device_blocks": 24,
        "num_host_blocks": 8,
        "block_size": 16,
    }
    assert line == {
        "event": "step",
        "step_id": 7,
        "at_us": 99,
        "inbox": [
            {"what": "teams", "teams": [1, 2]},
            {"what": "submit", "request": "new", "team": 2},
            {"what": "abort", "request": "nobody"},
        ],
        "rows": [
            {"request": "new", "team": 2, "level": 0, "kind": "prefill", "start": 0, "tokens": 16},
            {"request": "old", "team": 2, "level": 3, "kind": "decode", "start": 40, "tokens": 1, "promotions": 1},
            {"request": "lost", "team": 2, "level": 0, "kind": "replay", "start": 16, "tokens": 20, "promotions": 2},
        ],
        "copies_out": [{"copy_id": 11, "request": "out", "blocks": 2}],
        "copies_in": [{"copy_id": 12, "request": "in", "blocks": 1}],
        "copies_done": [11, 9],
        "copies_failed": [13],
        "ended": [{"request": "old", "reason": "stop"}],
        "duration_us": 5210,
        "free_blocks": 20,
        "free_host_blocks": 8,
    }
    assert str(SECRET) not in (tmp_path / "steps").read_text()
    assert stat.S_IMODE((tmp_path / "steps").stat().st_mode) == 0o600


def test_the_core_tells_every_boundary_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path / "steps")
    engine = logged(log)
    engine.core.step()  # nothing but the table of teams
    engine.core.add(submit("a", team_id=1, prompt=20, output=3))
    engine.core.add(submit("b", team_id=2, prompt=20, output=30))
    engine.core.step()
    engine.core.abort("b")
    engine.run()
    engine.core.abort("b")  # unknown by now
    engine.run()
    lines = read(tmp_path / "steps")[1:]
    assert [line["inbox"] for line in lines if line["inbox"]] == [
        [{"what": "teams", "teams": [0, 1, 2, 3]}],
        [{"what": "submit", "request": "a", "team": 1}, {"what": "submit", "request": "b", "team": 2}],
        [{"what": "abort", "request": "b"}],
        [{"what": "abort", "request": "b"}],
    ]
    assert [line["step_id"] for line in lines] == [None, 0, 1, 2, None]
    assert [[(row["request"], row["kind"]) for row in line["rows"]] for line in lines] == [
        *([], [("a", "prefill"), ("b", "prefill")], [("a", "decode")], [("a", "decode")], []),
    ]
    assert [line["ended"] for line in lines if line["ended"]] == [
        [{"request": "b", "reason": "abort"}],
        [{"request": "a", "reason": "length"}],
    ]
    assert [line["at_us"] for line in lines] == [0, 0, 400, 1400, 2400]
    assert [line["duration_us"] for line in lines] == [0, 400, 1000, 1000, 0]
    assert [line["free_blocks"] for line in lines] == [24, 20, 22, 24, 24]


def write_steps(log: StepLog, count: int, first: int = 0) -> None:
    for step_id in range(first, first + count):
        log.write(0, StepPlan(step_id, ()), StepResult(step_id, 1, {}), (), scheduler({}))


def test_a_full_file_is_moved_aside_and_both_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = open_log(path, bytes_max=2000)
    write_steps(log, 200)
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["steps", "steps.1"]
    old, new = read(tmp_path / "steps.1"), read(path)
    assert old[0]["event"] == new[0]["event"] == "start"
    ids = [line["step_id"] for line in [*old[1:], *new[1:]]]
    assert ids == list(range(200 - len(ids), 200)) and len(ids) > 8, "the newest, without a gap"
    assert max(path.stat().st_size, (tmp_path / "steps.1").stat().st_size) <= 2000


@pytest.mark.case("H25")
def test_a_link_to_the_file_stays_when_it_is_full(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "steps").symlink_to("disk/steps")
    log = open_log(tmp_path / "steps", 4096)
    write_steps(log, 200)
    log.close()
    assert (tmp_path / "steps").readlink() == Path("disk/steps")
    assert sorted(os.listdir(tmp_path / "disk")) == ["steps", "steps.1"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "steps"]


def test_a_line_longer_than_the_bound_is_not_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path / "steps", bytes_max=300)
    for index in range(3):
        for number in range(20):
            log.took(Abort(request_id=f"{index}-{number}"))
        write_steps(log, 1, first=index)
    for name, step_id in (("steps.1", 1), ("steps", 2)):
        start, line = read(tmp_path / name)
        assert start["event"] == "start" and line["step_id"] == step_id and len(line["inbox"]) == 20


def test_a_new_start_goes_on_behind_the_old_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = open_log(path)
    write_steps(log, 2)
    log.close()
    path.write_bytes(path.read_bytes() + b'{"event":"st')
    write_steps(open_log(path), 1)
    lines = path.read_bytes().splitlines()
    assert lines[3] == b'{"event":"st'
    assert [json.loads(line)["event"] for line in lines[:3] + lines[4:]] == ["start", "step", "step", "start", "step"]


def test_starting_again_and_again_grows_no_file_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    for _ in range(100):
        open_log(path, bytes_max=500).close()
    assert max(path.stat().st_size, (tmp_path / "steps.1").stat().st_size) <= 500


def test_a_file_that_somebody_moved_away_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    said: list[str] = []
    log = open_log(path, bytes_max=1000, said=said)
    path.unlink()
    write_steps(log, 20)
    assert said == [] and log.is_writing and read(path)[-1]["step_id"] == 19


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _missing(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(_directory, "Is a directory"), (_pipe, "not a regular file"), (_missing, "No such file or directory")],
)
def test_an_unusable_path_is_refused_with_one_line(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    path = tmp_path / "d" / "steps"
    path.parent.mkdir()
    spoil(path)
    with pytest.raises(StepLogError, match=why) as refused:
        open_log(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepLogError, match="step_log_max_bytes must be at least 1, got 0"):
        open_log(tmp_path / "steps", bytes_max=0)
    assert os.listdir(tmp_path) == []


def test_when_the_disk_is_full_the_log_stops_and_the_engine_not(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    said: list[str] = []
    log = open_log(path, said=said)
    engine = logged(log)
    engine.core.add(submit("a", output=50))
    for _ in range(5):
        engine.core.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))  # the next line fits in part only
    try:
        done = engine.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [finished.reason for message in done for finished in message.finished] == ["length"]
    assert len(said) == 1 and "the step log has stopped" in said[0] and str(path) in said[0]
    assert not log.is_writing
    assert [line["step_id"] for line in read(path)[1:]] == [0, 1, 2, 3, 4], "whole lines only"
    engine.core.add(submit("b", output=2))
    engine.run()
    assert len(said) == 1 and len(read(path)) == 6, "silent from then on"


def test_when_a_full_file_cannot_be_moved_only_the_log_stops(tmp_path: Path) -> None:
    (tmp_path / "steps.1").mkdir()
    said: list[str] = []
    log = open_log(tmp_path / "steps", bytes_max=1000, said=said)
    write_steps(log, 20)
    assert len(said) == 1 and "Is a directory" in said[0]
    assert not log.is_writing


def test_an_engine_that_cannot_write_its_step_log_does_not_start(tmp_path: Path) -> None:
    config = {"kind": "sim", "model": "tiny-random", "cache_dir": str(tmp_path), "step_log": str(tmp_path)}
    command = [sys.executable, "-m", "engine", "--socket", str(tmp_path / "s"), "--config", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "cannot write the step log" in line and str(tmp_path) in line and "Is a directory" in line
