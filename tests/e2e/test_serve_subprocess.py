"""`terazi serve` from outside, over TCP: the official client, the ledger, and how a server ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.e2e.clients import Stream, client_of, ledger_rows, long_body
from tests.support.e2e.server import Server, is_running, wait_until

MakeServer = Callable[..., Server]


def test_with_the_official_client_each_request_is_one_row(running: Server) -> None:
    running.json("team", "create", "first", "--tier", "gold")
    key = running.json("key", "create", "first")["key"]
    client = client_of(running, key)
    assert [model.id for model in client.models.list()] == ["tiny-random"]
    chat = client.chat.completions.create(
        model="tiny-random",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert chat.usage is not None
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (5, "length")
    chunks = list(
        client.chat.completions.create(
            model="tiny-random",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    text = client.completions.create(
        model="tiny-random", prompt=[300, 301], max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert text.usage is not None
    assert text.usage.prompt_tokens == 2

    def is_booked() -> bool:
        return bool(running.admin("GET", "reports/usage?team=first")["total"]["requests"] == 3)

    wait_until(is_booked, "three rows")
    line = running.json("usage", "report", "--by", "team,tier,model", "--team", "first")["data"][0]
    assert (line["team"], line["tier"], line["model"], line["ok"]) == ("first", "gold", "tiny-random", 3)
    assert line["output_tokens"] == 15
    assert line["prompt_tokens"] == chat.usage.prompt_tokens + chunks[-1].usage.prompt_tokens + 2
    assert line["device_seconds"] > 0


@pytest.mark.case("G51")
def test_a_revoked_key_is_refused_by_the_next_request(running: Server) -> None:
    running.json("team", "create", "leaver")
    made = running.json("key", "create", "leaver")
    assert set(made) == {"id", "key", "team"}
    client = client_of(running, made["key"])
    client.models.list()
    assert running.json("key", "revoke", made["id"])["status"] == "revoked"
    with pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert refused.value.code == "key_revoked"


def test_service_samples_are_stored_while_the_engine_works(running: Server) -> None:
    key = running.make_key("sampled")
    stream = Stream(running, key, long_body(60))
    assert stream.events()[-1] == "[DONE]"

    def has_samples() -> bool:
        return any(line["team"] == "sampled" for line in running.admin("GET", "reports/fairness")["data"])

    wait_until(has_samples, "a service sample")
    line = next(line for line in running.json("fairness", "report")["data"] if line["team"] == "sampled")
    assert line["device_seconds"] > 0
    assert line["weight"] == 4


@pytest.mark.case("G52", "D15")
def test_no_secret_is_in_logs_answers_or_files(running: Server) -> None:
    key = running.make_key("canary")
    secret = key.rpartition("-")[2]
    headers = {"authorization": f"Bearer {key}"}
    bodies = [httpx.get(f"{running.url}/v1/models", headers=headers).text]
    bodies.append(httpx.get(f"{running.url}/v1/models", headers={"authorization": f"Bearer {key[:-1]}"}).text)
    bodies.append(httpx.post(f"{running.url}/v1/completions", headers=headers, content=key.encode()).text)
    bodies.append(httpx.post(f"{running.url}/v1/completions", headers=headers, json={"model": 1}).text)
    bodies.append(running.terazi("key", "list", "--json").stdout)
    bodies += [running.log, running.out]
    for path in running.data_dir.rglob("*"):
        if path.is_file():
            bodies.append(path.read_bytes().decode("latin-1"))
    assert [body for body in bodies if secret in body] == []
    token = (running.data_dir / "admin.token").read_text().strip()
    assert token not in running.log + running.out


@pytest.mark.case("S17")
def test_admin_calls_and_metrics_need_the_token_and_are_not_public(running: Server) -> None:
    admin_url = running.info["admin_url"]
    for path in ("/metrics", "/admin/v1/teams", "/admin/v1/status"):
        assert httpx.get(f"{admin_url}{path}").status_code == 401
        assert httpx.get(f"{running.url}{path}").status_code == 404
    token = (running.data_dir / "admin.token").read_text().strip()
    metrics = httpx.get(f"{admin_url}/metrics", headers={"authorization": f"Bearer {token}"})
    assert metrics.status_code == 200
    assert "terazi_ready 1.0" in metrics.text
    assert "trz-" not in metrics.text


def metrics_of(server: Server) -> dict[str, float]:
    """Samples of /metrics by name with labels."""
    token = (server.data_dir / "admin.token").read_text().strip()
    text = httpx.get(f"{server.info['admin_url']}/metrics", headers={"authorization": f"Bearer {token}"}).text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.case("K76")
def test_metrics_count_what_happened_and_gauges_return_to_zero(running: Server) -> None:
    key = running.make_key("counted")
    before = metrics_of(running)
    client = client_of(running, key)
    for _ in range(3):
        client.completions.create(model="tiny-random", prompt="x", max_tokens=2, extra_body={"ignore_eos": True})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x", max_tokens=2)
    device_seconds = 'terazi_device_seconds_total{phase="compute",team="counted"}'
    report = running.admin("GET", "reports/usage?team=counted")["total"]

    def is_all_sampled() -> bool:
        phases = [value for name, value in metrics_of(running).items() if 'team="counted"' in name and "phase" in name]
        return round(sum(phases) * 1e6) == round(report["device_seconds"] * 1e6)

    wait_until(is_all_sampled, "the engine's samples sum up to the ledger")
    after = metrics_of(running)
    ended = 'terazi_requests_total{model="tiny-random",outcome="ok",team="counted",tier="gold"}'
    refused = 'terazi_refusals_total{code="model_not_found"}'
    assert after[ended] - before.get(ended, 0) == 3
    assert after[refused] - before.get(refused, 0) == 1
    assert after[device_seconds] > 0
    gauges = ("terazi_inflight", "terazi_running", "terazi_queued", "terazi_reservations_outstanding")
    for name, value in after.items():
        assert value == 0 or name.partition("{")[0] not in gauges, name
    assert all(value >= 0 for name, value in after.items() if "lag" not in name)
    assert "trz-" not in "".join(after)


@pytest.mark.case("D14")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_default_host_answers_on_both_loopback_addresses(running: Server, host: str) -> None:
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert httpx.get(f"http://{host}:{running.port}/livez").status_code == 200


@pytest.mark.case("D05")
def test_sigterm_lets_running_streams_finish(make_server: MakeServer) -> None:
    server = make_server().start()
    key = server.make_key()
    stream = Stream(server, key, long_body(60))
    port = server.port
    server.terminate()

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(is_closed, "new connections are refused")
    server.terminate()  # a second signal changes nothing
    assert stream.events()[-1] == "[DONE]"
    assert server.wait() == 0
    (row,) = ledger_rows(server)
    assert (row["outcome"], row["output_tokens"], row["team"]) == ("ok", 60, "search")
    assert not (server.data_dir / "server.json").exists()


@pytest.mark.case("D05")
def test_when_the_drain_time_is_over_streams_end_and_are_booked(make_server: MakeServer) -> None:
    server = make_server().start("--drain-timeout", "100ms", "--max-batch-size", "2")
    key = server.make_key()
    engine_pid = server.status()["engine"]["pid"]
    streams = [Stream(server, key, long_body()) for _ in range(2)]
    server.terminate()
    for stream in streams:
        events = stream.events()
        assert "[DONE]" not in events
        assert json.loads(events[-1])["error"]["code"] == "draining"
    assert server.wait() == 0
    rows = ledger_rows(server)
    assert [row["outcome"] for row in rows] == ["shutdown"] * 2
    assert all(row["output_tokens"] > 0 and row["device_us"] > 0 for row in rows)
    assert not is_running(engine_pid)


@pytest.mark.case("K46")
def test_after_kill_9_the_next_start_books_lost_rows(make_server: MakeServer) -> None:
    server = make_server().start()
    key = server.make_key()
    first = server.status()["engine"]
    stream = Stream(server, key, long_body())
    server.kill()
    wait_until(lambda: not is_running(first["pid"]), "the engine has ended", seconds=10)
    assert "[DONE]" not in stream.events()
    assert ledger_rows(server) == []

    server.start()
    second = server.status()["engine"]
    assert (second["engine_id"], second["epoch"]) == (first["engine_id"], first["epoch"] + 1)
    (row,) = ledger_rows(server)
    assert (row["outcome"], row["engine_epoch"], row["error_code"]) == ("lost", first["epoch"], "gateway_died")
    text = client_of(server, key).completions.create(model="tiny-random", prompt="x", max_tokens=1)
    assert text.usage is not None


def test_when_the_engine_dies_streams_end_and_it_starts_again(make_server: MakeServer) -> None:
    server = make_server().start()
    key = server.make_key()
    stream = Stream(server, key, long_body())
    pid = server.status()["engine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    events = stream.events()
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["type"] == "service_unavailable"
    wait_until(lambda: server.readyz() == 200 and server.status()["engine"]["pid"] != pid, "a new engine")
    assert server.status()["engine_restarts"] == 1
    client_of(server, key).completions.create(model="tiny-random", prompt="x", max_tokens=1)
    assert server.stop() == 0
    assert [row["outcome"] for row in ledger_rows(server)] == ["error", "ok"]


def test_quickstart_prints_a_line_that_works_and_may_be_used_again(make_server: MakeServer) -> None:
    server = make_server()
    for _ in range(2):
        server.start("--quickstart")
        wait_until(lambda: f"curl {server.url}/v1/chat/completions" in server.out, "the curl line")
        key = "trz-" + server.out.rpartition("Bearer trz-")[2].partition("'")[0]
        assert [model.id for model in client_of(server, key).models.list()] == ["tiny-random"]
        assert server.stop() == 0
    assert [team["name"] for team in server.json("team", "list")["data"]] == ["demo"]
    server.start("--quickstart", "--json")
    assert server.out.count("SIMULATED") == 2, "the start says that no model answers"
    wait_until(lambda: server.out.rstrip().endswith("}"), "the document")
    started = json.loads("{" + server.out.rpartition("\n{")[2])
    assert set(started) == {"url", "admin_url", "data_dir", "model", "simulated", "key"}
    assert started["simulated"] is True
    assert [model.id for model in client_of(server, started["key"]).models.list()] == ["tiny-random"]


def test_what_commands_wrote_without_a_server_a_server_sees(make_server: MakeServer) -> None:
    server = make_server()
    server.json("team", "create", "early", "--tier", "gold")
    key = server.json("key", "create", "early")["key"]
    assert server.terazi("team", "create", "early").returncode == 4
    server.start()
    assert [model.id for model in client_of(server, key).models.list()] == ["tiny-random"]
    assert server.json("quota", "set", "early", "--requests-per-minute", "0")["limits"]["requests_per_minute"] == 0
    with pytest.raises(openai.RateLimitError):
        client_of(server, key).completions.create(model="tiny-random", prompt="x", max_tokens=1)


def test_an_engine_of_its_own_outlives_the_gateways(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    path = tmp_path / "e.sock"
    command = [sys.executable, "-P", "-m", "gateway.cli", "engine", "--listen", str(path)]
    command += ["--engine", "sim", "--model", "tiny-random", "--max-batch-size", "3"]
    with (tmp_path / "engine.log").open("wb") as log:
        engine = subprocess.Popen(command, env=server.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        for _ in range(2):
            server.start("--engine-socket", str(path))
            status = server.status()["engine"]
            assert (status["pid"], status["epoch"], status["max_batch_size"]) == (engine.pid, 1, 3)
            assert server.stop() == 0
            engine.terminate()  # ignored: a draining gateway would still need it
    finally:
        engine.kill()
        engine.wait()


def first_answer(client: socket.socket) -> int:
    """Status of the answer; 0 when the connection was reset before it could be read."""
    try:
        return int(client.recv(200).split(b" ")[1])
    except ConnectionResetError:
        return 0


@pytest.mark.case("D13")
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit (util-linux)")
def test_more_connections_than_files_leave_admin_and_ledger_working(make_server: MakeServer) -> None:
    server = make_server().start(max_files=256)
    key = server.make_key()
    clients = []
    try:
        for _ in range(400):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            clients.append(client)
        answers = [first_answer(client) for client in clients]
        assert answers.count(200) == 256 - 64
        assert set(answers) <= {200, 503, 0}
        assert server.status()["ready"] is True
        server.make_key("late")
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: server.readyz() == 200, "room for clients again")
    client_of(server, key).completions.create(model="tiny-random", prompt="x", max_tokens=1)
    assert server.stop() == 0
    assert [row["outcome"] for row in ledger_rows(server)] == ["ok"]
