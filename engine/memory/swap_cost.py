"""When bringing KV back from the host costs less than computing it again: one number for a model on a device.

With k bytes of KV a token, P parameters and F effective floating-point operations a second, the way out and back of a
token takes 2k / BW and its recomputation 2P / F. So swapping wins above the break-even bandwidth BW* = F * k / P, and
with a clean host copy, which needs no way out, above half of it.
"""

from policies.cost import StepProfile


def break_even_bandwidth(kv_bytes_per_token: float, num_parameters: float, flops: float) -> float:
    """BW* in bytes per second. `flops`: effective floating-point operations per second of a prefill."""
    return flops * kv_bytes_per_token / num_parameters


def measured_break_even_bandwidth(kv_bytes_per_token: float, profile: StepProfile) -> float:
    """BW* in bytes per second from the measured time of a prompt token (2P / F); 0 when the profile has none."""
    if profile.prefill_token_us <= 0:
        return 0.0
    return break_even_bandwidth(kv_bytes_per_token, 1.0, 2e6 / profile.prefill_token_us)
