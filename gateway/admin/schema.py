"""The bodies that the admin API takes, and the records that it shows. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.errors import BadRequest
from gateway.openai.json_body import FLOAT_EXACT_MAX, fields_of, not_json, without_mark
from policies.tiers import Tier
from tenants.clock import iso
from tenants.key_format import redact
from tenants.keys import ApiKey
from tenants.teams import Team

FIELDS_MAX = 64  # in one body; a body with more is refused


class TeamCreate(msgspec.Struct, frozen=True, kw_only=True):
    """POST /admin/v1/teams."""

    name: str
    tier: str


class TeamUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """PATCH /admin/v1/teams/{name}. Fields that are not given stay as they are."""

    tier: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    archived: bool | UnsetType = UNSET


class KeyCreate(msgspec.Struct, frozen=True, kw_only=True):
    """POST /admin/v1/teams/{name}/keys. There is no field for the key itself, because a caller cannot choose it."""

    name: str = "default"
    expires_at: str | None = None


class TierUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """PATCH /admin/v1/tiers/{name}. Fields that are not given stay as they are."""

    weight: int | UnsetType = UNSET
    start_level: int | UnsetType = UNSET
    starving_after_ms: int | UnsetType = UNSET
    promotion_burst_grants: int | UnsetType = UNSET
    max_queue_seconds: int | UnsetType = UNSET


class EmptyBody(msgspec.Struct, frozen=True):
    """POST /admin/v1/keys/{id}/revoke. The body has no fields."""


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a body. An empty body is an empty object, and a whole number is an int, even if written as 8.0.

    Raises BadRequest; its `param` names the field, if a single field is wrong.
    """
    body = without_mark(body)
    if not body.strip():
        return {}
    try:
        fields = fields_of(body, FIELDS_MAX)
    except msgspec.ValidationError:
        raise BadRequest("The body must be a JSON object.", code="invalid_json") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise not_json(body, error) from None
    return {name: _value(name, value, body) for name, value in fields.items()}


def _value(name: str, raw: msgspec.Raw, body: bytes) -> Any:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # the value is JSON, but a number beyond all floats
        shown = redact(name[:80])
        raise BadRequest(f"{shown}: {str(error).partition(' - at ')[0]}.", code="invalid_value", param=shown) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise not_json(body, error) from None
    # 8.0 counts as 8. The reader of the field refuses 8.5, and a float that may not be exact.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= FLOAT_EXACT_MAX
    return int(value) if is_whole else value


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`. Raises BadRequest, with `param`, for an unknown field or a wrong type."""
    document = decode_object(body)
    check_names(document, kind.__struct_fields__, "field")
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        raise BadRequest(f"{param}: {what}." if param else f"{what}.", code="invalid_value", param=param) from None


def check_names(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raises BadRequest for the first given name that is not in `known`. The message names the nearest known name."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            if near:
                hint = f"Did you mean {near[0]}?"
            else:
                hint = f"Known: {', '.join(known)}." if known else "None is allowed here."
            shown = redact(name[:80])
            raise BadRequest(f"Unknown {what} {shown!r}. {hint}", code="unknown_field", param=shown)


def changes_of(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that a PATCH body sets. Raises BadRequest when it sets none."""
    changes = {name: getattr(body, name) for name in body.__struct_fields__ if getattr(body, name) is not UNSET}
    if not changes:
        raise BadRequest(
            f"Nothing to change: give at least one of {', '.join(body.__struct_fields__)}.", code="empty_change"
        )
    return changes


def team_record(team: Team) -> dict[str, Any]:
    """A team as the API shows it."""
    return {
        "object": "team",
        "id": team.team_id,
        "name": team.name,
        "tier": team.tier,
        "limits": asdict(team.limits),
        "num_keys": team.num_keys,
        "created_at": iso(team.created_at_us),
        "archived_at": iso(team.archived_at_us),
    }


def quota_record(team: Team) -> dict[str, Any]:
    """A team's limits as the API shows them. null means no limit, 0 means that nothing is allowed."""
    return {"object": "quota", "team": team.name, "limits": asdict(team.limits)}


def key_record(key: ApiKey, now_us: int) -> dict[str, Any]:
    """A key as the API shows it, without its secret and without the secret's hash."""
    status = "active"
    if key.revoked_at_us is not None:
        status = "revoked"
    elif key.is_team_archived:
        status = "team_archived"
    elif key.expires_at_us is not None and key.expires_at_us <= now_us:
        status = "expired"
    return {
        "object": "api_key",
        "id": key.public_id,
        "team": key.team,
        "project": key.project,
        "name": key.name,
        "status": status,
        "created_at": iso(key.created_at_us),
        "expires_at": iso(key.expires_at_us),
        "revoked_at": iso(key.revoked_at_us),
    }


def tier_record(tier: Tier) -> dict[str, Any]:
    """A tier as the API shows it."""
    return {"object": "tier", **asdict(tier)}


def list_record(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A list of records as the API shows it."""
    return {"object": "list", "data": records}
