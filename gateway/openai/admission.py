"""Who a caller is, and what its request may hold. No call here waits, and a claim that was begun ends exactly once."""

from collections.abc import Iterable
from datetime import UTC, datetime

from gateway.errors import Forbidden, GatewayError, Overloaded, QuotaSpent, RateLimited, Unauthenticated, Unavailable
from gateway.openai.state import GatewayState, draining_error
from policies.tiers import Tier
from tenants.errors import Denied, InvalidKey, KeyExpired, KeyRevoked, LimitExceeded, StoreUnavailable
from tenants.leases import ReservationState
from tenants.rows import LedgerRow, OpenEntry
from tenants.snapshot import Identity

_MAX_KEY_CHARS = 512
# An unknown, a wrong and a malformed key get the same text.
_INVALID_KEY = "Incorrect API key provided. Send 'Authorization: Bearer <your team's key>'."
_NO_KEY = "No API key provided. Send 'Authorization: Bearer <your team's key>'."

_LIMIT_FLAGS = {
    "requests": "requests-per-minute",
    "tokens": "tokens-per-minute",
    "concurrent_limit": "concurrent",
}

RawHeaders = Iterable[tuple[bytes, bytes]]


def key_from(headers: RawHeaders) -> str:
    """The API key that a request carries, in `Authorization: Bearer`, `x-api-key` or `api-key`.

    A query string is not read. The scheme is case-insensitive (RFC 9110 §11.1), and blanks around the key do not count;
    the key itself is taken as it is. An Authorization header with another scheme, or without a key, is ignored when a
    key stands in another header: a proxy with a password of its own passes that header on. Raises Unauthenticated when
    there is no key, or several keys that differ.
    """
    keys: set[str] = set()
    has_other_scheme = False
    for raw_name, raw_value in headers:
        name = raw_name.lower()
        value = raw_value.decode("latin-1").strip(" \t")
        if name == b"authorization":
            scheme, _, key = value.replace("\t", " ").partition(" ")
            if scheme.lower() == "bearer":
                keys.add(key.strip(" "))
            elif value:
                has_other_scheme = True
        elif name in (b"x-api-key", b"api-key"):
            keys.add(value)
    keys.discard("")
    if len(keys) > 1:
        raise Unauthenticated("The request carries several API keys that differ; send one.")
    if keys:
        return keys.pop()
    if has_other_scheme:
        raise Unauthenticated("The Authorization header must have the form 'Bearer <key>'.")
    raise Unauthenticated(_NO_KEY)


def identify(state: GatewayState, headers: RawHeaders) -> Identity:
    """The identity of the request's key, from the snapshot in memory. Raises Unauthenticated or Forbidden."""
    key = key_from(headers)
    if len(key) > _MAX_KEY_CHARS:
        raise Unauthenticated(_INVALID_KEY)
    now = datetime.fromtimestamp(state.clock.now_us() / 1e6, UTC)
    try:
        return state.snapshot_holder.current.identify(key, now)
    except InvalidKey:
        raise Unauthenticated(_INVALID_KEY) from None
    except (KeyRevoked, KeyExpired) as error:
        raise Unauthenticated(error.message, code=error.code) from None
    except Denied as error:
        raise Forbidden(error.message, code=error.code) from None


def limit_error(error: LimitExceeded) -> GatewayError:
    """The 429 for a limit that the caller's team has reached."""
    message = error.message
    if error.hard == 0:
        message += (
            " A limit of 0 allows none at all, so trying again cannot help; an operator can raise it: "
            f"terazi quota set {error.name} --{_LIMIT_FLAGS.get(error.limit, error.limit)} N"
        )
    elif error.never_fits and error.limit == "tokens":
        message += " A request reserves its prompt and its 'max_tokens'; send a smaller 'max_tokens'."
    details = {"scope": error.scope, "limit": error.hard, "used": error.used, "requested": error.requested}
    kind = RateLimited if error.limit in ("requests", "tokens", "concurrent_limit") else QuotaSpent
    refusal = kind(
        message,
        code=error.code,
        details=details,
        retry_after_seconds=error.retry_after_seconds,
    )
    if error.never_fits:  # the same request can never be admitted
        refusal.should_retry = False
        refusal.has_time = error.hard > 0  # a smaller request can be, at that time
    return refusal


class Claim:
    """What one request holds: from the start a request and a slot, later its tokens and a ledger entry.

    It ends in exactly one `settle` or `release`, and in one `close` if `admit` has succeeded.
    """

    def __init__(self, state: GatewayState, identity: Identity) -> None:
        """Reserve one request and one slot. Raises RateLimited, or Unavailable while the server drains."""
        if state.is_draining:
            raise draining_error()
        self._state = state
        self.identity = identity
        self.is_open = False  # whether there is a ledger entry that is not closed
        try:
            self._reservation = state.leases.reserve_request(identity)
        except LimitExceeded as error:
            raise limit_error(error) from None

    def admit(self, entry: OpenEntry) -> None:
        """Reserve prompt and max tokens, and open the ledger entry.

        Raises RateLimited, or Unavailable when the ledger cannot be written. Everything has then been given back.
        """
        try:
            self._state.leases.reserve_tokens(self._reservation, entry.prompt_tokens + entry.max_tokens)
            self._state.ledger.open(entry)
        except LimitExceeded as error:
            raise limit_error(error) from None
        except StoreUnavailable as error:
            self.release()
            raise Unavailable(error.message, code="store_unavailable", retry_after_seconds=5) from None
        self.is_open = True
        self._state.meters.opened(entry)

    @property
    def is_outstanding(self) -> bool:
        """Whether the claim is neither settled nor released."""
        return self._reservation.state is ReservationState.OUTSTANDING

    def settle(self, tokens_used: int) -> None:
        """End a claim whose request was submitted and used so many tokens."""
        self._state.leases.settle(self._reservation, tokens_used)

    def amend(self, tokens_used: int | None) -> None:
        """Correct what was settled, once the ledger row is known. None gives everything back."""
        self._state.leases.amend(self._reservation, tokens_used)

    def release(self) -> None:
        """End a claim whose request was refused or never ran: give everything back.

        Does nothing if the claim has ended.
        """
        if self.is_outstanding:
            self._state.leases.release(self._reservation)

    def close(self, row: LedgerRow) -> None:
        """Book the request's ledger row. Call it once, after `admit`."""
        assert self.is_open, "a row without an open entry, or a second one"
        self.is_open = False
        self._state.ledger.close(row)
        self._state.meters.ended(row)


def queue_timeout(tier: Tier) -> Overloaded:
    """The error of a request that waited as long as its tier allows and has not started."""
    return Overloaded(
        f"The request did not start within {tier.max_queue_seconds} s, the longest that the tier {tier.name} waits. "
        "Try again when less is going on, or ask the operator for a longer wait: "
        f"terazi tier set {tier.name} --max-queue-seconds N",
        code="queue_timeout",
        retry_after_seconds=10,
    )
