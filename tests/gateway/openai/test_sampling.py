"""Sampling fields from the JSON body to the sampler: what is refused, what arrives, and that a row gets a token."""

import json
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.device.sampler import Draw, sample
from engine.sampling import sampling_fault
from engine.wire.messages import SamplingParams, Submit
from gateway.errors import BadRequest
from gateway.openai.completions import sampling_of
from gateway.prepare.prepare import prepare
from tests.support.engine.simple_engine import Engine, submit
from tests.support.gateway.fake_engine import VOCAB_SIZE, hello
from tests.support.gateway.harness import MODEL, TEXT, TOKENIZER, gateway

HELLO = hello()
FIELDS = ("temperature", "top_p", "top_k", "seed", "min_tokens", "max_tokens", "stop_token_ids")

# Numbers as JSON text: any float, any integer (also as a float), and what is no number.
EDGES = (
    *("0", "-0", "-0.0", "0.0", "1", "1.0", "2", "2.0", "-1", "true", "false", "null", '"1"', "[]", "[0.5]", "{}"),
    *(
        "1e-46",
        "1E-45",
        "1.4e-45",
        "5e-324",
        "1e-320",
        "1e-400",
        "1.1754942e-38",
        "1.1754944e-38",
        "2.2250738585072014e-308",
    ),
    *("1e308", "1.7976931348623157e308", "1e309", "1e400", "3.4028235e38", "0.9999999999999999", "1.0000000000000002"),
    *("2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775808"),
    *("-9223372036854775809", "18446744073709551615", "18446744073709551616", "1" + "0" * 400, "1" + "0" * 5000),
)
NUMBERS = st.one_of(
    st.sampled_from(EDGES),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(0, 2).map(repr),
    st.integers().map(str),
    st.integers(-2, 600).map(str),
)
IDS = st.lists(NUMBERS, max_size=3).map(lambda items: f"[{', '.join(items)}]")
BODIES = st.fixed_dictionaries(
    {},
    optional={name: IDS if name == "stop_token_ids" else NUMBERS for name in FIELDS},
)


def to_engine(fields: dict[str, str], prompt: str = '"hello"') -> SamplingParams:
    """The gateway's way of a body, up to what the engine reads from its socket. Raises BadRequest."""
    body = ", ".join(
        f'"{name}": {value}' for name, value in {"model": f'"{MODEL}"', "prompt": prompt, **fields}.items()
    )
    prepared = prepare(
        TEXT, f"{{{body}}}".encode(), is_json=True, hello=HELLO, tokenizer=TOKENIZER, default_max_tokens=64
    )
    message = Submit(request_id="r", team_id=1, prompt_token_ids=prepared.token_ids, sampling=sampling_of(prepared))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit).sampling


@pytest.mark.case("T01")
@settings(max_examples=300, deadline=None)
@given(fields=BODIES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example({"temperature": "1e-46"}, torch.float32)
@example({"temperature": "5e-324", "top_p": "5e-324"}, torch.bfloat16)
@example({"seed": "-1", "top_k": "1" + "0" * 400}, torch.float32)
def test_a_body_is_refused_by_name_or_gets_a_token(fields: dict[str, str], dtype: torch.dtype) -> None:
    try:
        sampling = to_engine(fields)
    except BadRequest as refusal:
        assert refusal.param is not None and refusal.param.partition("[")[0] in fields
        return
    assert sampling_fault(sampling, VOCAB_SIZE) is None, "what the gateway lets through the engine takes"
    logits = torch.linspace(-3, 3, VOCAB_SIZE).to(dtype).unsqueeze(0)
    banned = {2, *sampling.stop_token_ids} if sampling.min_tokens else set()
    ids, errors = sample(logits, [Draw(sampling, 9, 0, (2,))], VOCAB_SIZE)
    assert errors == [""] and 0 <= ids[0] < VOCAB_SIZE and ids[0] not in banned


@pytest.mark.case("T01")
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("temperature", "1e-46"),
        ("temperature", "5e-324"),
        ("temperature", "-0.0"),
        ("temperature", "0"),
        ("top_p", "0.0"),
    ],
)
def test_what_is_almost_0_is_answered_as_0(field: str, text: str) -> None:
    logits = torch.linspace(-3, 3, VOCAB_SIZE)
    found = {
        sample(logits.clone().unsqueeze(0), [Draw(to_engine({field: text}), p, 0, ())], 512)[0][0] for p in range(9)
    }
    assert found == {VOCAB_SIZE - 1}


@pytest.mark.case("T01")
def test_more_than_every_token_is_every_token() -> None:
    assert to_engine({"top_k": "1" + "0" * 400}).top_k > VOCAB_SIZE
    assert to_engine({"top_k": str(2**31)}).top_k == to_engine({"top_k": str(2**70)}).top_k


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("T02")
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, 2**70, -(2**70)])
def test_an_id_outside_the_vocabulary_is_named(field: str, token_id: int) -> None:
    with pytest.raises(BadRequest) as caught:
        to_engine(
            {field: f"[7, {token_id}]"} if field != "prompt" else {}, f"[7, {token_id}]" if field == "prompt" else "[7]"
        )
    error = caught.value
    assert (error.param, error.code, error.status) == (field, "invalid_token_id", 400)
    assert f"'{field}[1]' is {token_id}" in error.message and f"0 to {VOCAB_SIZE - 1}" in error.message


@pytest.mark.case("T02")
def test_the_first_and_the_last_id_are_taken() -> None:
    assert to_engine({"stop_token_ids": f"[0, {VOCAB_SIZE - 1}]"}, f"[0, {VOCAB_SIZE - 1}]").stop_token_ids == (0, 511)


@pytest.mark.case("T02", "H18")
@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"stop_token_ids": (5, 256)}, "stop_token_ids must lie in [0, 256), got 256"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must lie in [0, 256), got -1"),
        ({"seed": 2**63}, "seed must have 64 bits"),
        ({"seed": -(2**63) - 1}, "seed must have 64 bits"),
    ],
)
def test_the_engine_too_refuses_foreign_ids_and_seeds(sampling: dict[str, Any], words: str) -> None:
    refused = Engine().core.add(submit("x", **sampling))
    assert refused is not None and refused.code == "invalid_request" and words in refused.message


@pytest.mark.anyio
@pytest.mark.case("T02")
async def test_a_foreign_stop_id_over_http_is_a_400_and_nothing_runs() -> None:
    async with gateway() as g:
        response = await g.chat(stop_token_ids=[VOCAB_SIZE])
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "stop_token_ids", "invalid_token_id")
        assert not g.engine.submitted and not g.outstanding()


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.case("C6", "H18")
async def test_seed_0_is_a_seed_and_minus_1_is_none() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("x")
        for seed in (0, 0, -1, -1, None, 7, -2, 2**63 - 1, -(2**63)):
            response = await g.chat(seed=seed)
            assert response.status_code == 200
        seeds = [message.sampling.seed for message in g.engine.submitted]
        assert seeds[:2] == [0, 0]
        assert len(set(seeds[2:5])) == 3 and not {-1, 0} & set(seeds[2:5]), "drawn anew each time"
        assert seeds[5:] == [7, -2, 2**63 - 1, -(2**63)]


@pytest.mark.case("H18")
@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_a_seed_of_more_than_64_bits_is_refused_by_name(seed: int) -> None:
    with pytest.raises(BadRequest) as caught:
        to_engine({"seed": json.dumps(seed)})
    assert (caught.value.param, caught.value.code) == ("seed", "invalid_value")
    assert "-1 is any" in caught.value.message


@pytest.mark.case("H18")
def test_each_seed_is_its_own() -> None:
    seeds = (0, 1, -2, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1, 2**32, sys.maxsize - 1)
    logits = torch.zeros((1, VOCAB_SIZE))

    def text(seed: int) -> tuple[int, ...]:
        sampling = to_engine({"seed": str(seed)})
        return tuple(sample(logits.clone(), [Draw(sampling, p, p, ())], VOCAB_SIZE)[0][0] for p in range(8))

    texts = [text(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds) and texts == [text(seed) for seed in seeds]
    assert text(-1) != text(-1)
