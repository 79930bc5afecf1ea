"""The real engine process over its real socket: who dies, who stalls, who lies, and what the engine does about it.

Nothing here measures time; each wait is for an event, and a watchdog of the test run ends what never comes.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import StartError
from engine.process.loop import main
from engine.wire.framing import encode
from engine.wire.messages import Refused, ServiceSamples, StepDone
from tests.support.engine.engine_process import END_SECONDS, Process, ended
from tests.support.engine.simple_engine import submit


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(**kwargs: Any) -> Process:
        processes.append(Process(tmp_path / "engine.sock", cache, **kwargs))
        return processes[-1]

    yield begin
    for process in processes:
        process.cleanup()


@pytest.fixture
def engine(start: Callable[..., Process]) -> Process:
    process = start()
    process.listening()
    return process


def test_hello_then_tokens_then_a_sample(engine: Process) -> None:
    gateway = engine.connect()
    hello = gateway.hello()
    assert hello.kind == "sim" and hello.policy == "eg-mlfq" and hello.pid == engine.process.pid
    assert hello.model.name == "tiny-random" and hello.num_device_blocks > 0
    got = gateway.run(submit("a", team_id=1, prompt=5, output=4))
    tokens = [t for m in got if isinstance(m, StepDone) for e in m.tokens for t in e.token_ids]
    assert len(tokens) == 4 and all(0 <= t < hello.model.vocab_size for t in tokens)
    samples = gateway.until(lambda m: isinstance(m, ServiceSamples))[-1]
    assert [t.team_id for t in samples.teams] == [1]
    spent = sum(m.duration_us for m in got if isinstance(m, StepDone))
    assert samples.teams[0].served_us == spent == got[-1].finished[0].device_us


def test_refusals_come_back_as_messages(engine: Process) -> None:
    gateway = engine.connect()
    gateway.hello()
    gateway.send(submit("x", team_id=77))
    refused = gateway.receive()
    assert isinstance(refused, Refused) and refused.code == "invalid_request"


def test_the_epoch_rises_at_each_start_and_the_id_stays(start: Callable[..., Process]) -> None:
    seen = []
    for _ in range(2):
        process = start()
        event = process.listening()
        gateway = process.connect()
        hello = gateway.hello()
        assert (event["engine_id"], event["epoch"]) == (hello.engine_id, hello.epoch)
        seen.append((hello.engine_id, hello.epoch))
        process.process.kill()  # leaves a stale socket file behind
        process.process.wait()
        assert process.path.exists()
    assert seen[0][0] == seen[1][0] and [epoch for _, epoch in seen] == [1, 2]


def test_a_damaged_epoch_file_begins_a_new_engine_id(start: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "engine.sock.epoch").write_text('{"engine_id": "eng-old", "ep')
    event = start().listening()
    assert event["engine_id"] != "eng-old" and event["epoch"] == 1


@pytest.mark.case("K46")
def test_the_engine_ends_when_its_parents_pipe_closes(engine: Process) -> None:
    gateway = engine.connect()
    gateway.hello()
    gateway.send(submit("a", team_id=1, output=500))
    gateway.until(lambda m: isinstance(m, StepDone))
    assert engine.end() == 0
    assert not engine.path.exists()
    with pytest.raises((EOFError, ConnectionError)):
        gateway.until(lambda m: False)


@pytest.mark.case("K46")
def test_the_engine_ends_when_its_parent_is_killed(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "engine.sock"
    config = json.dumps({"kind": "sim", "model": "tiny-random"})
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'engine', '--socket', {str(path)!r},"
        f" '--config', {config!r}, '--parent-stdin'], stdin=subprocess.PIPE)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "TERAZI_CACHE_DIR": str(cache)}
    )
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())["pid"]
    engine_end = os.pidfd_open(pid)
    try:
        assert os.path.exists(path)
        parent.kill()
        parent.wait()
        ready, _, _ = select.select([engine_end], [], [], END_SECONDS)
        assert ready, "the engine outlived its parent"
    finally:
        if not select.select([engine_end], [], [], 0)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(engine_end)
        parent.stdout.close()


def test_sigterm_and_sigint_are_ignored(engine: Process) -> None:
    gateway = engine.connect()
    gateway.hello()
    gateway.send(submit("a", team_id=1, output=30))
    gateway.until(lambda m: isinstance(m, StepDone))
    engine.process.send_signal(signal.SIGTERM)
    engine.process.send_signal(signal.SIGINT)
    got = gateway.until(lambda m: "a" in ended([m]))
    assert ended(got) == {"a": "length"}
    assert ended(gateway.run(submit("b", team_id=1, output=2))) == {"b": "length"}
    assert engine.process.poll() is None


@pytest.mark.case("K40")
def test_when_a_gateway_is_lost_the_next_finds_an_empty_engine(engine: Process) -> None:
    gateway = engine.connect()
    blocks = gateway.hello().num_device_blocks
    gateway.send(*(submit(f"r{i}", team_id=1, prompt=40, output=2000) for i in range(5)))
    gateway.until(lambda m: isinstance(m, StepDone) and m.num_running == 5)
    gateway.close()
    successor = engine.connect()
    successor.hello()
    got = successor.run(submit("r0", team_id=2, output=2))  # the same id: nothing of the old one is left
    assert ended(got) == {"r0": "length"}
    assert (got[-1].num_running, got[-1].num_waiting, got[-1].num_free_blocks) == (1, 0, blocks)


@pytest.mark.case("K40")
def test_a_killed_gateway_process_is_noticed(engine: Process, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from engine.wire.messages import StepDone\n"
        "from tests.support.engine.engine_process import Gateway\n"
        "from tests.support.engine.simple_engine import submit\n"
        f"g = Gateway(Path({str(engine.path)!r})); g.hello()\n"
        "g.send(submit('a', team_id=1, output=2000)); g.until(lambda m: isinstance(m, StepDone))\n"
        "print('running', flush=True); sys.stdin.read()\n"
    )
    root = Path(__file__).resolve().parents[3]
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == b"running\n"
    other.kill()
    other.wait()
    other.stdout.close()
    other.stdin.close()
    assert engine.process.stderr is not None
    line = engine.process.stderr.readline().decode()
    assert "connection closed" in line and "1 requests aborted" in line
    gateway = engine.connect()
    gateway.hello()
    assert ended(gateway.run(submit("a", team_id=1, output=2))) == {"a": "length"}


def test_a_newer_connection_replaces_the_older(engine: Process) -> None:
    first = engine.connect()
    first.hello()
    first.send(submit("a", team_id=1, output=2000))
    first.until(lambda m: isinstance(m, StepDone))
    second = engine.connect()
    second.hello()
    with pytest.raises((EOFError, ConnectionError)):
        first.until(lambda m: False)
    got = second.run(submit("b", team_id=1, output=3))
    assert ended(got) == {"b": "length"} and got[-1].num_waiting == 0


def test_a_stopped_gateway_fills_the_outbox_and_costs_nothing_else(start: Callable[..., Process]) -> None:
    """Nobody reads: the engine stops stepping at its limit. When reading goes on, nothing is missing."""
    process = start(max_outbox_bytes=20_000, max_batch_size=64)
    process.listening()
    gateway = process.connect()
    gateway.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    gateway.hello()
    gateway.send(*(submit(f"request-{'x' * 200}-{i}", team_id=1, output=60) for i in range(60)))
    # The engine has stopped when it sleeps in its poll with our data still unread: wait for that state, not a time.
    wait_until_asleep(process.process.pid)
    rss_before = resident_kib(process.process.pid)
    wait_until_asleep(process.process.pid)
    assert resident_kib(process.process.pid) - rss_before < 4096
    got = gateway.until(lambda m: isinstance(m, StepDone) and m.num_running == len(m.finished) and bool(m.finished))
    steps = [m for m in got if isinstance(m, StepDone)]
    tokens: dict[str, int] = {}
    for step in steps:
        for event in step.tokens:
            tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.token_ids)
    assert len(tokens) == 60 and set(tokens.values()) == {60}
    assert [step.step_id for step in steps] == sorted({step.step_id for step in steps})
    assert set(ended(got).values()) == {"length"}
    stood_still_us = steps[-1].finished[0].total_us - sum(step.duration_us for step in steps)
    assert stood_still_us > 300_000, "it waited for its reader, which looked away for longer than that"


def test_a_stopped_gateway_can_be_replaced_and_its_end_is_seen(start: Callable[..., Process]) -> None:
    process = start(max_outbox_bytes=2_000)
    process.listening()
    stopped = process.connect()
    stopped.hello()
    stopped.send(*(submit(f"request-{'x' * 500}-{i}", team_id=1, output=1000) for i in range(60)))
    wait_until_asleep(process.process.pid)
    successor = process.connect()
    successor.hello()
    assert ended(successor.run(submit("b", team_id=1, output=3))) == {"b": "length"}
    successor.send(*(submit(f"request-{'y' * 500}-{i}", team_id=1, output=1000) for i in range(60)))
    wait_until_asleep(process.process.pid)
    assert process.end() == 0, "a full outbox does not hide the parent's end"


def test_a_gateway_stopped_by_sigstop_and_continued_gets_everything(start: Callable[..., Process]) -> None:
    process = start(max_outbox_bytes=20_000)
    process.listening()
    root = Path(__file__).resolve().parents[3]
    script = (
        "from pathlib import Path\n"
        "from engine.wire.messages import StepDone\n"
        "from tests.support.engine.engine_process import Gateway, ended\n"
        "from tests.support.engine.simple_engine import submit\n"
        f"g = Gateway(Path({str(process.path)!r})); g.hello()\n"
        "g.send(*(submit(f\"request-{'x' * 300}-{i}\", team_id=1, output=40) for i in range(40)))\n"
        "g.until(lambda m: isinstance(m, StepDone)); print('running', flush=True)\n"
        "got = {}\n"
        "while len(got) < 40: got.update(ended([g.receive()]))\n"
        "print('ended', len(got), set(got.values()), flush=True)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root)
    assert other.stdout is not None
    assert other.stdout.readline() == b"running\n"
    other.send_signal(signal.SIGSTOP)
    wait_until_asleep(process.process.pid)
    assert process.process.poll() is None
    other.send_signal(signal.SIGCONT)
    assert other.stdout.readline() == b"ended 40 {'length'}\n"
    other.wait(END_SECONDS)
    other.stdout.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x00",
    ],
)
def test_the_engine_survives_garbage(engine: Process, garbage: bytes) -> None:
    vandal = engine.connect()
    vandal.hello()
    vandal.send(submit("a", team_id=1, output=500))
    vandal.until(lambda m: isinstance(m, StepDone))
    vandal.socket.sendall(garbage)
    with pytest.raises((EOFError, ConnectionError)):
        vandal.until(lambda m: False)
    gateway = engine.connect()
    gateway.hello()
    assert ended(gateway.run(submit("b", team_id=1, output=2))) == {"b": "length"}


def test_when_half_a_frame_came_the_next_gateway_is_served(engine: Process) -> None:
    half = engine.connect()
    half.hello()
    half.socket.sendall(encode(submit("a", team_id=1))[:7])
    gateway = engine.connect()
    gateway.hello()
    assert ended(gateway.run(submit("b", team_id=1, output=2))) == {"b": "length"}


def test_without_a_parent_the_engine_outlives_its_gateways(start: Callable[..., Process]) -> None:
    process = start(parent_stdin=False)
    process.listening()
    assert process.process.stdin is not None
    process.process.stdin.close()
    for name in ("a", "b"):
        gateway = process.connect()
        gateway.hello()
        assert ended(gateway.run(submit(name, team_id=1, output=2))) == {name: "length"}
        gateway.close()
    assert process.process.poll() is None


def test_a_second_engine_on_the_same_path_is_refused(engine: Process, start: Callable[..., Process]) -> None:
    second = start()
    assert second.process.wait(END_SECONDS) == 1
    assert second.stderr().startswith(f"terazi-engine: another engine listens on {engine.path}")
    gateway = engine.connect()
    gateway.hello()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "cuda"}, "engine kind 'cuda' is unknown"),
        ({"model": "/nowhere/at/all"}, "neither a built-in name"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1"),
        ({"memory_preemption": "swap"}, "memory_preemption 'swap' is unknown; use proactive, reactive"),
        ({"swap_link_percent": 0}, "swap_link_percent must be from 1 to 100, got 0"),
        ({"swap_benefit": -1}, "swap_benefit must be at least 0, got -1"),
        ({"promotion_percent": 100}, "promotion_percent must be from 0 to 99, got 100"),
        ({"policy": "lottery"}, "unknown policy 'lottery'"),
        ({"block_size": "many"}, "not a valid engine configuration"),
        ({"kv_memory_bytes": 10}, "holds no block"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(
    start: Callable[..., Process], config: dict[str, object], words: str
) -> None:
    process = start(**config)
    assert process.process.wait(END_SECONDS) == 1
    stderr = process.stderr()
    assert stderr.count("\n") == 1 and stderr.startswith("terazi-engine: ") and words in stderr


def test_a_path_that_is_no_socket_is_left_alone(start: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "engine.sock").write_text("precious")
    process = start()
    assert process.process.wait(END_SECONDS) == 1
    assert "is not a socket" in process.stderr()
    assert (tmp_path / "engine.sock").read_text() == "precious"


def test_the_socket_is_private(engine: Process) -> None:
    assert engine.path.stat().st_mode & 0o777 == 0o600


def test_an_idle_engine_does_not_spin(engine: Process) -> None:
    gateway = engine.connect()
    gateway.hello()
    gateway.run(submit("a", team_id=1, output=2))
    gateway.until(lambda m: isinstance(m, ServiceSamples))
    wait_until_asleep(engine.process.pid)
    wakeups = voluntary_switches(engine.process.pid)
    for _ in range(4):
        wait_until_asleep(engine.process.pid)
    assert voluntary_switches(engine.process.pid) == wakeups, "it sleeps until something happens"


def wait_until_asleep(pid: int) -> None:
    """Until the process has slept through 300 looks at its state, with the same count of wake-ups at each.

    That is longer than any simulated step sleeps, so it is the sleep of a poll that nothing ends.
    """
    calm, switches = 0, -1
    pause = threading.Event()
    while calm < 300:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        now = voluntary_switches(pid)
        calm = calm + 1 if state == "S" and now == switches else 0
        switches = now
        pause.wait(0.001)


def voluntary_switches(pid: int) -> int:
    return _status_number(pid, "voluntary_ctxt_switches")


def resident_kib(pid: int) -> int:
    return _status_number(pid, "VmRSS")


def _status_number(pid: int, name: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1])


def test_a_bug_at_the_start_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last line is what the gateway tells; what stands above it is for whoever mends it."""
    for error, has_traceback in (
        (KeyError("oops"), True),
        (StartError("no such model"), False),
        (OSError(28, "full"), False),
    ):

        def start(_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("engine.process.loop._start", start)
        monkeypatch.setattr("engine.process.loop.IGNORED_SIGNALS", ())
        assert main(["--socket", "/nowhere"]) == 1
        said = capfd.readouterr().err
        assert said.splitlines()[-1].startswith("terazi-engine: ")
        assert ("Traceback" in said) == has_traceback
