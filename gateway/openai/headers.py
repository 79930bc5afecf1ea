"""The headers that tell a caller its limits, tier and times.

A limit that is not set, or a time not yet known, is left out.
"""

from tenants.leases import LimitsView
from tenants.snapshot import Identity


def duration_text(seconds: float) -> str:
    """A duration as OpenAI writes a limit's reset: 120ms, 1s, 6m0s, 1h2m3s.

    Rounded up, so that it is never too early.
    """
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    total = -(-milliseconds // 1000)
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def limit_headers(view: LimitsView) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, for the limits that are set."""
    headers: dict[str, str] = {}
    for name, limit in (("requests", view.requests), ("tokens", view.tokens)):
        if limit.limit is None or limit.remaining is None or limit.reset_seconds is None:
            continue
        headers[f"x-ratelimit-limit-{name}"] = str(limit.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(limit.remaining)
        headers[f"x-ratelimit-reset-{name}"] = duration_text(limit.reset_seconds)
    return headers


def tier_headers(identity: Identity) -> dict[str, str]:
    """The headers with the team's tier, and the level at which its requests start."""
    return {"x-terazi-tier": identity.tier.name, "x-terazi-start-level": str(identity.tier.start_level)}


def timing_headers(*, queue_us: int | None, first_token_us: int | None) -> dict[str, str]:
    """`x-terazi-queue-ms` and `server-timing`, from the times that are known, given in microseconds."""
    headers: dict[str, str] = {}
    timings: list[str] = []
    if queue_us is not None:
        headers["x-terazi-queue-ms"] = str(queue_us // 1000)
        timings.append(f"queue;dur={queue_us / 1000:.1f}")
    if first_token_us is not None:
        timings.append(f"ttft;dur={first_token_us / 1000:.1f}")
    if timings:
        headers["server-timing"] = ", ".join(timings)
    return headers
