"""Nobody gains by how they send their work: the attacker's share of the device against an honest team's.

One team, the attacker, and one honest team of equal weight contend for the whole run. The attacker sends the same
demand in the honest way or in a twisted one. What it gets is measured in device seconds charged, and for the ways
that are about waiting, in the time to the first token of both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from engine.clock import VirtualClock
from engine.sim.runner import SimRunner
from engine.wire.messages import StepDone, Submit, TeamEntry
from policies.catalog import make_policy
from policies.config import from_profile
from policies.cost import StepProfile
from tests.support.engine.simple_engine import Engine, submit, team

PROFILE = StepProfile(
    fixed_us=4000.0, prefill_token_us=100.0, prefill_attention_us=0.02, decode_row_us=800.0, decode_context_us=0.5
)
HONEST, ATTACKER = 0, 1
CONTEXT_LEN = 8192
GAIN_MAX = 1.05
SECONDS = 40


@dataclass
class Ask:
    """One request a client wants to send."""

    prompt: int
    output: int
    max_tokens: int = 0  # what it says; 0 is the truth
    abort_after: int | None = None  # tokens, after which the client leaves; 0 is while the prompt is computed


Client = Callable[[], Iterator[Ask]]


@dataclass
class Outcome:
    """What a team got."""

    device_us: int = 0
    tokens: int = 0
    first_token_us: list[int] = field(default_factory=list)


class Contest:
    """Closed loops: each client keeps its number of requests inside, and sends the next when one ends."""

    def __init__(
        self,
        clients: dict[int, list[Iterator[Ask]]],
        *,
        policy: str = "eg-mlfq",
        slots: int = 8,
        teams: tuple[TeamEntry, ...] = (),
        warm_up_us: int = 0,
        blocks: int = 4096,
        **constants_changed: object,
    ) -> None:
        """Team 0 starts `warm_up_us` after the others. What is changed of the policy's constants, for controls."""
        plain = from_profile(PROFILE, levels=8, fairness_window_us=1_000_000, chunk_tokens=256, context_len=CONTEXT_LEN)
        self.constants = constants = replace(plain, **constants_changed)  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.engine = Engine(
            blocks=blocks,
            policy=make_policy(policy, constants),
            profile=PROFILE,
            runner=SimRunner(PROFILE, self.clock),
            clock=self.clock,
            context_len=CONTEXT_LEN,
            max_batch_size=slots,
            max_batch_tokens=512,
            prefill_chunk_tokens=256,
            teams=teams or tuple(team(team_id) for team_id in sorted(clients)),
        )
        self.outcomes = {team_id: Outcome() for team_id in clients}
        self._late = (warm_up_us, clients[HONEST]) if warm_up_us else None
        self._owner: dict[str, tuple[int, Iterator[Ask], Ask, int]] = {}
        self._charged: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._number = 0
        for team_id, loops in clients.items():
            for loop in loops if team_id != HONEST or not warm_up_us else ():
                self._send(team_id, loop)

    @property
    def theta_us(self) -> int:
        """How much further ahead of another a team may get, times the sum of the weights."""
        return max(self.constants.fairness_window_us, self.constants.quantum_cost_us * len(self.outcomes))

    def run(self, seconds: float = SECONDS) -> dict[int, Outcome]:
        core = self.engine.core
        while self.clock.now_us() < seconds * 1_000_000 and core.has_work:
            if self._late is not None and self.clock.now_us() >= self._late[0]:
                for loop in self._late[1]:
                    self._send(HONEST, loop)
                self._late = None
            done = core.step()
            if done is not None:
                self._book(done)
        return self.outcomes

    def _send(self, team_id: int, loop: Iterator[Ask]) -> None:
        ask = next(loop, None)
        if ask is None:
            return
        name = f"r{self._number}"
        self._number += 1
        message: Submit = submit(name, team_id=team_id, prompt=ask.prompt, output=ask.max_tokens or ask.output)
        assert self.engine.core.add(message) is None
        self._owner[name] = (team_id, loop, ask, self.clock.now_us())
        self._tokens[name] = 0

    def _book(self, done: StepDone) -> None:
        for event in done.tokens:
            team_id, _, ask, sent_us = self._owner[event.request_id]
            outcome = self.outcomes[team_id]
            outcome.device_us += event.device_us - self._charged.get(event.request_id, 0)
            self._charged[event.request_id] = event.device_us
            before, now = self._tokens[event.request_id], self._tokens[event.request_id] + len(event.token_ids)
            self._tokens[event.request_id] = now
            outcome.tokens += len(event.token_ids)
            if now and not before:
                outcome.first_token_us.append(self.clock.now_us() - sent_us)
            wants_end = ask.output if ask.abort_after is None else ask.abort_after
            if now >= wants_end:
                self.engine.core.abort(event.request_id)
        for finished in done.finished:
            team_id, loop, _, _ = self._owner.pop(finished.request_id)
            self._send(team_id, loop)


def forever(ask: Ask) -> Iterator[Ask]:
    while True:
        yield ask


def honest(loops: int = 8) -> list[Iterator[Ask]]:
    return [forever(Ask(prompt=200, output=100)) for _ in range(loops)]


TWISTS: dict[str, Callable[[], list[Iterator[Ask]]]] = {
    "splitting each request into ten": lambda: [forever(Ask(20, 10)) for _ in range(80)],
    "many more connections": lambda: honest(200),
    "one enormous request at a time": lambda: [forever(Ask(4000, 2000))],
    "leaving after the first token": lambda: [forever(Ask(200, 100, abort_after=1)) for _ in range(64)],
    "leaving while a huge prompt is computed": lambda: [forever(Ask(6000, 100, abort_after=0)) for _ in range(64)],
    "saying max_tokens is small": lambda: [forever(Ask(200, 8)) for _ in range(64)],
    "saying max_tokens is huge": lambda: [forever(Ask(200, 100, max_tokens=4000)) for _ in range(64)],
    "one-token requests": lambda: [forever(Ask(1, 1)) for _ in range(128)],
}


@pytest.mark.parametrize("blocks", [4096, 520])
@pytest.mark.parametrize("twist", TWISTS)
def test_no_way_of_sending_buys_a_larger_share(twist: str, blocks: int) -> None:
    """Also when two large requests fill the memory."""
    fair = Contest({HONEST: honest(), ATTACKER: honest()}, blocks=blocks).run()
    twisted = Contest({HONEST: honest(), ATTACKER: TWISTS[twist]()}, blocks=blocks).run()
    gain = twisted[ATTACKER].device_us / fair[ATTACKER].device_us
    loss = fair[HONEST].device_us / twisted[HONEST].device_us
    assert gain <= GAIN_MAX and loss <= GAIN_MAX
