"""The demo's runs compared: what may have disturbed them is said."""

import pytest

from gateway.demo.run import speed_warnings


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(4.0, 4.4, ""), (4.0, 4.41, "differed by 10 %"), (5.0, 4.0, "differed by 25 %"), (None, 4.0, "")],
)
def test_a_machine_that_was_faster_in_one_run_is_said(first: float | None, second: float, said: str) -> None:
    runs = [
        {"policy": policy, "device_ms_per_output_token": speed}
        for policy, speed in (("fcfs", first), ("eg-mlfq", second))
    ]
    (warning,) = speed_warnings(runs) or [""]
    assert said in warning and bool(warning) == bool(said)
    assert not said or "not fair" in warning
