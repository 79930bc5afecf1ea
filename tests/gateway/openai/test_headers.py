"""Headers of limits and times: OpenAI's way to write them, and nothing that is not known."""

import pytest

from gateway.openai.headers import duration_text, limit_headers, timing_headers
from tenants.leases import LimitsView, LimitView

NONE = LimitView(None, None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.2, "2s"),
        (59.9, "1m0s"),
        (360, "6m0s"),
        (3723, "1h2m3s"),
    ],
)
def test_durations_read_as_openais_and_are_never_too_early(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_only_limits_that_are_set_have_headers() -> None:
    view = LimitsView(requests=LimitView(5, 2, 30.0), tokens=NONE, concurrent=LimitView(1, 1, None))
    assert limit_headers(view) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "30s",
    }


def test_times_that_are_not_known_are_left_out() -> None:
    assert timing_headers(queue_us=None, first_token_us=None) == {}
    assert timing_headers(queue_us=None, first_token_us=1500) == {"server-timing": "ttft;dur=1.5"}
    both = timing_headers(queue_us=2500, first_token_us=1500)
    assert both == {"x-terazi-queue-ms": "2", "server-timing": "queue;dur=2.5, ttft;dur=1.5"}
