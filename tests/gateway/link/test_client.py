"""The connection to the engine: one message a step, bounded, and a death that every stream hears of."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.wire.messages import PROTOCOL_VERSION, SamplingParams, ServiceSamples, Submit
from gateway.errors import EngineDied, Unavailable
from gateway.link.client import EngineClient
from policies.sequences import TeamTerms
from tests.support.gateway.fake_engine import FakeEngine, byte_ids, hello
from tests.support.gateway.harness import WAIT, eventually

pytestmark = pytest.mark.anyio


def submission(name: str, prompt: tuple[int, ...] = (5, 6)) -> Submit:
    return Submit(request_id=name, team_id=1, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=64))


@contextlib.asynccontextmanager
async def connected(**options: int) -> AsyncIterator[tuple[EngineClient, FakeEngine]]:
    directory = Path(tempfile.mkdtemp(prefix="tz-"))
    engine = FakeEngine(directory / "s")
    await engine.start()
    client = EngineClient(directory / "s", **options)  # type: ignore[arg-type]
    await client.connect()
    try:
        yield client, engine
    finally:
        await client.close()
        await engine.stop()
        shutil.rmtree(directory)


async def test_tokens_arrive_in_batches_and_then_the_end() -> None:
    async with connected() as (client, engine):
        stream = client.submit(submission("a"))
        await engine.next_submit()
        engine.say("a", "xy")
        engine.say("a", "z")
        engine.finish("a", "stop")
        token_ids = []
        while stream.finished is None:
            token_ids += await stream.get()
        assert token_ids == byte_ids("xyz")
        assert stream.finished is not None and stream.finished.output_tokens == 3
        assert (stream.num_tokens, stream.device_us) == (3, 3000)
        assert client.num_streams == 0


async def test_a_step_of_many_requests_wakes_each_once() -> None:
    async with connected() as (client, engine):
        streams = {name: client.submit(submission(name)) for name in "abc"}
        for _ in streams:
            await engine.next_submit()
        before = engine.num_frames_sent
        engine.step({name: [10, 11, 12] for name in streams})
        assert engine.num_frames_sent == before + 1
        for stream in streams.values():
            assert await stream.get() == [10, 11, 12]


async def test_a_wake_returns_without_tokens_and_is_used_up() -> None:
    async with connected() as (client, engine):
        stream = client.submit(submission("a"))
        await engine.next_submit()
        stream.wake()
        assert await stream.get() == []
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.say("a", "x")
        assert await waiting == byte_ids("x")


async def test_death_ends_every_stream_after_its_last_tokens() -> None:
    async with connected() as (client, engine):
        streams = [client.submit(submission(name)) for name in "ab"]
        for _ in streams:
            await engine.next_submit()
        engine.say("a", "x")
        await eventually(lambda: streams[0].num_tokens)
        engine.die()
        await client.wait_closed()
        assert await streams[0].get() == byte_ids("x"), "what came before it died is not lost"
        for stream in streams:
            with pytest.raises(EngineDied):
                await stream.get()
        assert not client.is_ready and client.num_streams == 0
        with pytest.raises(EngineDied):
            client.submit(submission("c"))


async def test_it_connects_again_and_tells_the_teams_again() -> None:
    async with connected() as (client, engine):
        client.configure_teams([TeamTerms(team_id=3, weight=4, start_level=1)])
        await eventually(lambda: engine.teams is not None)
        assert engine.teams.teams[0].team_id == 3 and engine.teams.teams[0].weight == 4
        engine.teams = None
        engine.die()
        await client.wait_closed()
        assert (await client.connect()).engine_id == "fake"
        await eventually(lambda: engine.teams is not None)


async def test_an_engine_that_does_not_read_gets_no_more_submissions() -> None:
    async with connected(max_unsent_bytes=100_000) as (client, engine):
        await engine.start_stalling()
        with pytest.raises(Unavailable) as caught:
            for number in range(1000):
                client.submit(submission(str(number), prompt=(7,) * 10_000))
        assert caught.value.status == 503 and caught.value.retry_after_seconds >= 1
        client.abort("0")  # small, and always written


async def test_nobody_there_is_an_engine_died() -> None:
    client = EngineClient(Path(tempfile.gettempdir()) / "tz-nobody")
    with pytest.raises(EngineDied, match="cannot be reached"):
        await client.connect()


@pytest.mark.parametrize(("version", "older"), [(99, "gateway"), (1, "engine")])
async def test_another_protocol_version_is_refused_naming_both(version: int, older: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="tz-"))
    engine = FakeEngine(directory / "s", hello(protocol_version=version))
    await engine.start()
    client = EngineClient(directory / "s")
    with pytest.raises(EngineDied) as refused:
        await client.connect()
    assert f"the engine speaks protocol {version} and this gateway {PROTOCOL_VERSION};" in refused.value.message
    assert f"the {older} is the older one: run both from the same version of Terazi" in refused.value.message
    assert not client.is_ready
    await engine.stop()
    shutil.rmtree(directory)


async def test_a_silent_listener_is_given_up() -> None:
    directory = Path(tempfile.mkdtemp(prefix="tz-"))
    done = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    server = await asyncio.start_unix_server(silent, directory / "s")
    client = EngineClient(directory / "s")
    with pytest.raises(EngineDied, match="no greeting"):
        await client.connect(timeout_seconds=0.01)
    done.set()
    server.close()
    shutil.rmtree(directory)


async def test_bytes_that_are_no_message_end_the_connection() -> None:
    async with connected() as (client, engine):
        stream = client.submit(submission("a"))
        await engine.next_submit()
        engine.send_raw(b"\x00\x00\x00\x03abc")
        with pytest.raises(EngineDied):
            await stream.get()
        assert not client.is_ready


async def test_late_words_for_a_forgotten_request_are_dropped() -> None:
    async with connected() as (client, engine):
        stream = client.submit(submission("a"))
        await engine.next_submit()
        client.forget(stream)
        engine.say("a", "x")
        other = client.submit(submission("b"))
        await engine.next_submit()
        engine.say("b", "y")
        assert await other.get() == byte_ids("y")
        assert stream.num_tokens == 0 and client.num_streams == 1


async def test_samples_go_to_their_callback() -> None:
    async with connected() as (client, engine):
        seen: asyncio.Queue[ServiceSamples] = asyncio.Queue()
        client.on_samples = seen.put_nowait
        engine.send(ServiceSamples(interval_ms=1000, teams=()))
        assert (await asyncio.wait_for(seen.get(), WAIT)).interval_ms == 1000


async def test_silence_counts_only_while_somebody_waits() -> None:
    async with connected() as (client, engine):
        now = [100.0]
        client._clock = lambda: now[0]
        now[0] = 500.0
        assert client.silent_seconds == 0
        stream = client.submit(submission("a"))
        await engine.next_submit()
        now[0] = 540.0
        assert client.silent_seconds == 40
        engine.say("a", "x")
        await stream.get()
        assert client.silent_seconds == 0
