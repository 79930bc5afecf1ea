"""The service's loop, turn by turn, in this process: what the order of events must not break."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.clock import VirtualClock
from engine.process.listener import Address
from engine.process.loop import EngineService
from engine.process.samples import ServiceSampler
from engine.wire.framing import encode
from engine.wire.messages import ConfigureTeams, Hello, ModelInfo, ProfileInfo
from tests.support.engine.simple_engine import Engine, submit, team

HELLO = Hello(
    protocol_version=1,
    engine_id="eng-test",
    epoch=1,
    pid=1,
    kind="sim",
    policy="arrival-order",
    model=ModelInfo(name="m", path="", vocab_size=1, context_len=1, eos_token_ids=(), dtype="", device=""),
    profile=ProfileInfo(fixed_us=0, prefill_token_us=0, prefill_attention_us=0, decode_row_us=0, decode_context_us=0),
    block_size=1,
    num_device_blocks=1,
    num_host_blocks=0,
    max_batch_size=1,
    max_batch_tokens=1,
)


class Loop:
    def __init__(self, path: Path) -> None:
        self.engine = Engine()
        self.address = Address(path)
        self.listener = self.address.listen()
        self.log: list[str] = []
        self.service = EngineService(
            self.listener,
            self.engine.core,
            ServiceSampler(self.engine.policy, 0),
            VirtualClock(),
            HELLO,
            max_outbox_bytes=1 << 20,
            log=self.log.append,
        )

    def connect(self) -> socket.socket:
        gateway = socket.socket(socket.AF_UNIX)
        gateway.connect(str(self.address.path))
        self.service.turn()
        gateway.sendall(encode(ConfigureTeams(teams=(team(1),))))
        self.service.turn()
        return gateway


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "engine.sock")
    yield made
    made.service._drop("the test is over")
    made.service._selector.close()
    made.listener.close()
    made.address.close()


@pytest.mark.case("K43")
def test_what_a_lost_gateway_sent_after_its_loss_was_noticed_is_void(loop: Loop) -> None:
    gateway = loop.connect()
    gateway.sendall(encode(submit("refused", team_id=9)) + encode(submit("ghost", team_id=1)))
    gateway.close()  # the refusal cannot be delivered: the loss is noticed between the two
    loop.service.turn()
    assert loop.engine.core.request_ids == frozenset() and not loop.engine.core.has_work
    assert len(loop.log) == 1 and "0 requests aborted" in loop.log[0]


def test_when_a_gateway_is_replaced_its_requests_end_first(loop: Loop) -> None:
    first = loop.connect()
    first.sendall(encode(submit("a", team_id=1, output=50)))
    loop.service.turn()
    assert loop.engine.core.request_ids == {"a"}
    second = loop.connect()
    assert loop.engine.core.request_ids == frozenset()
    assert loop.engine.scheduler.memory.device.num_owned == 0
    assert "replaced" in loop.log[0] and "1 requests aborted" in loop.log[0]
    first.close()
    second.close()


def test_a_sample_is_taken_before_the_table_of_teams_changes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy may close the account of a team that has left, and what it got since the last sample with it."""
    gateway = loop.connect()
    events: list[str] = []
    monkeypatch.setattr(loop.service._sampler, "take", lambda now_us: events.append("sample"))
    monkeypatch.setattr(loop.engine.core, "configure", lambda message: events.append("table"))
    gateway.sendall(encode(submit("a", team_id=1, output=2)))
    while loop.engine.core.request_ids or not loop.engine.scheduler.num_steps:
        loop.service.turn()
    gateway.sendall(encode(ConfigureTeams(teams=())))
    loop.service.turn()
    assert events == ["sample", "table"]
    gateway.close()
