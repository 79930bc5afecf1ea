"""Room that teams share: bounds at the edge, turns, and nobody left waiting."""

import asyncio
import random

import pytest

from gateway.prepare.fair_room import FairRoom
from tests.support.gateway.harness import eventually

pytestmark = pytest.mark.anyio


async def start(room: FairRoom, team_id: int, amount: int) -> "asyncio.Task[None]":
    """A demand that has been made."""
    task = asyncio.create_task(room.take(team_id, amount))
    await asyncio.sleep(0)
    return task


@pytest.mark.case("T03")
async def test_when_a_team_is_full_then_only_that_team_waits() -> None:
    room = FairRoom(team_max=10, total_max=25)
    await room.take(1, 10)
    own = await start(room, 1, 1)
    await room.take(2, 10)
    await room.take(3, 5)
    assert not own.done() and (room.held, room.held_by(1), room.num_waiting) == (25, 10, 1)
    room.give_back(1, 1)
    await own
    assert room.held == 25 and room.num_waiting == 0


async def test_when_the_total_is_full_then_teams_take_turns() -> None:
    room = FairRoom(team_max=10, total_max=10)
    await room.take(9, 10)
    order: list[int] = []

    async def one(team_id: int) -> None:
        await room.take(team_id, 10)
        order.append(team_id)
        room.give_back(team_id, 10)

    tasks = [asyncio.create_task(one(team_id)) for team_id in (1, 1, 1, 1, 2, 3, 2)]
    await eventually(lambda: room.num_waiting == len(tasks))
    room.give_back(9, 10)
    await asyncio.gather(*tasks)
    assert order == [1, 2, 3, 1, 2, 1, 1]


async def test_when_a_large_demand_is_next_then_small_ones_wait() -> None:
    room = FairRoom(team_max=10, total_max=20)
    await room.take(1, 10)
    await room.take(2, 5)
    large = await start(room, 3, 10)
    small = await start(room, 4, 1)
    assert not large.done() and not small.done(), "it would never be the large one's turn"
    room.give_back(2, 5)
    await large
    assert not small.done()
    room.give_back(1, 10)
    await small


async def test_when_a_demand_is_cancelled_then_others_pass() -> None:
    room = FairRoom(team_max=10, total_max=20)
    await room.take(1, 10)
    await room.take(2, 5)
    large = await start(room, 3, 10)
    small = await start(room, 4, 1)
    large.cancel()
    await small
    assert (room.num_waiting, room.held) == (0, 16)


async def test_when_granted_and_cancelled_at_once_then_nothing_stays() -> None:
    room = FairRoom(team_max=1, total_max=1)
    await room.take(1, 1)
    waiting = await start(room, 2, 1)
    room.give_back(1, 1)  # grants
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert room.held == 0


async def test_any_order_of_takers_keeps_the_bounds_and_ends() -> None:
    rng = random.Random(3)
    room = FairRoom(team_max=7, total_max=15)

    async def one(team_id: int) -> None:
        amount = rng.randint(0, 7)
        try:
            await room.take(team_id, amount)
        except asyncio.CancelledError:
            return
        assert room.held <= 15 and room.held_by(team_id) <= 7
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        room.give_back(team_id, amount)

    tasks = [asyncio.create_task(one(rng.randrange(5))) for _ in range(500)]
    for _ in range(40):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (room.held, room.num_waiting) == (0, 0)
