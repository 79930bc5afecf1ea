"""Bodies on their way to prompts: how many bytes at once, whose body is next, and where the work is done.

*Bytes.* A body is read only while its bytes have room: `team_bytes` for each team and `total_bytes` in all. A body
without room stays unread in the client's socket, and TCP holds the client back. After `wait_seconds` the request is
refused. A body with an announced length takes that length. A body of unknown length (chunked, gzip) first takes the
most that a small body may have, and later, if it grows larger, `max_body_bytes` too. A quarter of both bounds is kept
for small
bodies, so that a team's large requests do not hold up its ordinary requests.

*Work.* Small bodies are prepared in the event loop, middling bodies in one thread, and large bodies in a process of
their own (`gateway.prepare.worker`). The process is needed because decoding and rendering hold the interpreter's lock,
whatever the thread. Teams take turns for the thread and for the process (`gateway.prepare.fair_room`).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.wire.messages import Hello
from gateway.errors import GatewayError, Overloaded, Unavailable
from gateway.openai.wire import Endpoint
from gateway.prepare.body_bounds import SMALL_PART, body_bounds
from gateway.prepare.fair_room import FairRoom
from gateway.prepare.prepare import Prepared, prepare
from gateway.prepare.process import PrepareProcess, WorkerLost
from gateway.text.tokenizer import ModelTokenizer

_RETRY_SECONDS = 5.0


class Preparation:
    """Owns the bytes in preparation, the thread and the worker process. Sizes are bytes, times are seconds.

    `inline_bytes` is the largest body that is prepared in the event loop, `small_bytes` the largest that is prepared in
    the thread. `waiting_requests` is how many bodies of one team may wait for room. Raises ValueError when the bounds
    do not fit together.
    """

    def __init__(
        self,
        *,
        max_body_bytes: int,
        inline_bytes: int,
        small_bytes: int,
        team_bytes: int,
        total_bytes: int,
        waiting_requests: int,
        wait_seconds: float,
        run_seconds: float,
        idle_seconds: float,
        memory_bytes: int,
    ) -> None:
        team, total = body_bounds(
            max_body_bytes=max_body_bytes, small_bytes=small_bytes, team_bytes=team_bytes, total_bytes=total_bytes
        )
        self.max_body_bytes = max_body_bytes
        self.small_bytes = min(small_bytes, max_body_bytes)
        self._inline_bytes = inline_bytes
        self.small = FairRoom(team_max=team // SMALL_PART, total_max=total // SMALL_PART)
        self.large = FairRoom(team_max=team - team // SMALL_PART, total_max=total - total // SMALL_PART)
        self._waiting_requests = waiting_requests
        self._wait_seconds = wait_seconds
        self._thread_turns = FairRoom(team_max=1, total_max=1)
        self._process_turns = FairRoom(team_max=1, total_max=1)
        self._thread: ThreadPoolExecutor | None = None
        self.process = PrepareProcess(memory_bytes=memory_bytes, run_seconds=run_seconds, idle_seconds=idle_seconds)

    @property
    def held_bytes(self) -> int:
        """The bytes that are reserved for bodies being read or prepared."""
        return self.small.held + self.large.held

    @property
    def num_waiting(self) -> int:
        """The number of bodies that wait for room, unread or half read."""
        return self.small.num_waiting + self.large.num_waiting

    def hold(self, team_id: int) -> "BodyHold":
        """A hold for one request's body, which holds nothing at first."""
        return BodyHold(self, team_id)

    async def prepare(
        self,
        team_id: int,
        endpoint: Endpoint,
        body: bytes,
        *,
        is_json: bool,
        hello: Hello,
        tokenizer: ModelTokenizer,
        default_max_tokens: int,
        check: Callable[[], None],
    ) -> Prepared:
        """Run `gateway.prepare.prepare.prepare` where it disturbs least. `check` raises when the outcome is not wanted
        any more.

        Raises what `prepare` and `check` raise, Unavailable when the worker process is lost, and Overloaded or
        Unavailable when the team's turn does not come within `wait_seconds`.
        """

        def work() -> Prepared:
            check()
            return prepare(
                endpoint,
                body,
                is_json=is_json,
                hello=hello,
                tokenizer=tokenizer,
                default_max_tokens=default_max_tokens,
            )

        if len(body) <= self._inline_bytes:
            return work()
        is_small = len(body) <= self.small_bytes
        turns = self._thread_turns if is_small else self._process_turns
        await self._wait(turns, team_id, 1)
        try:
            if is_small:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "terazi-prepare")
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            check()
            try:
                answer = await self.process.call(
                    endpoint, body, is_json=is_json, hello=hello, default_max_tokens=default_max_tokens
                )
            except WorkerLost as lost:
                raise Unavailable(
                    f"The process that reads large requests was lost while it read this one: {lost}.",
                    code="preparation_failed",
                    retry_after_seconds=_RETRY_SECONDS,
                ) from None
        finally:
            turns.give_back(team_id, 1)
        if answer.refusal is not None:
            raise answer.refusal.error()
        assert answer.prepared is not None, "an answer is one of the two"
        return answer.prepared

    async def take_bytes(self, room: FairRoom, team_id: int, num_bytes: int) -> None:
        """Wait for room for so many bytes.

        Raises Overloaded when the team's own bound leaves no room, and Unavailable when the bound of all teams does.
        """
        if room.num_waiting_of(team_id) >= self._waiting_requests:
            raise Overloaded(
                f"{self._waiting_requests} request bodies of this team already wait to be read; send fewer at once.",
                code="preparation_full",
                details={"scope": "team", "limit": self._waiting_requests},
                retry_after_seconds=_RETRY_SECONDS,
            )
        await self._wait(room, team_id, num_bytes)

    async def _wait(self, room: FairRoom, team_id: int, amount: int) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await room.take(team_id, amount)
        except TimeoutError:
            raise self._full(room, team_id, amount) from None

    def _full(self, room: FairRoom, team_id: int, amount: int) -> GatewayError:
        waited = f"within {self._wait_seconds:g} s"
        if room.is_at_team_max(team_id, amount):
            return Overloaded(
                f"This team's other requests left no room to read this one {waited}; send fewer at once.",
                code="preparation_full",
                details={"scope": "team"},
                retry_after_seconds=_RETRY_SECONDS,
            )
        return Unavailable(
            f"The server had no room to read this request {waited}.",
            code="preparation_full",
            retry_after_seconds=_RETRY_SECONDS,
        )

    async def stop(self) -> None:
        """End the thread and the worker process."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        await self.process.stop()


class BodyHold:
    """What one request's body holds of the bounds, from before the body is read until it has been prepared."""

    def __init__(self, preparation: Preparation, team_id: int) -> None:
        self._preparation = preparation
        self._team_id = team_id
        self._held: list[tuple[FairRoom, int]] = []

    @property
    def small_bytes(self) -> int:
        """The most bytes that a body of unknown length may have before `take` must be called again."""
        return self._preparation.small_bytes

    async def take(self, num_bytes: int | None) -> None:
        """Wait for room for a body of so many bytes. None stands for a body of unknown length, which is taken for
        small.

        If that body turns out larger, call this again with the most bytes that it can have. Raises Overloaded or
        Unavailable.
        """
        preparation = self._preparation
        amount = preparation.small_bytes if num_bytes is None else num_bytes
        # A body that has grown keeps its share of the room for small bodies until the end. Bodies wait for room among
        # large bodies while they hold room among small ones, but never the other way, so no two wait for each other.
        room = preparation.small if amount <= preparation.small_bytes else preparation.large
        await preparation.take_bytes(room, self._team_id, amount)
        self._held.append((room, amount))

    def give_back(self) -> None:
        """Give the room back: the body is gone from memory. A second call does nothing."""
        while self._held:
            room, amount = self._held.pop()
            room.give_back(self._team_id, amount)
