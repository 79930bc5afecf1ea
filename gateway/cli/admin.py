"""`terazi team|key|tier|quota`: each command is one call on the admin API."""

import math
import re
import sys
from typing import Annotated, Any

import typer

from gateway.cli.options import DataDir, Json, data_dir_of
from gateway.command import EXIT_NOT_FOUND, EXIT_USAGE, CommandError, print_json, print_record, print_table, reporting

team_app = typer.Typer(help="Teams: who shares the GPU.", no_args_is_help=True)
key_app = typer.Typer(help="API keys of teams.", no_args_is_help=True)
tier_app = typer.Typer(help="Tiers: classes of service.", no_args_is_help=True)
quota_app = typer.Typer(help="Limits of teams.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Team = Annotated[str, typer.Argument(metavar="TEAM")]
Number = str | None
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)  # team names, tier names and public ids
_TIER_COLUMNS = ["name", "weight", "start_level", "starving_after_ms", "promotion_burst_grants", "max_queue_seconds"]
_EMPTY, _FULL, _NONE = "max_pause_with_an_empty_queue", "max_pause_with_a_full_queue", "no_max_pause"
_TIER_COLUMNS += [_EMPTY, _FULL]
TEAMS, KEYS, TIERS = "/admin/v1/teams", "/admin/v1/keys", "/admin/v1/tiers"


def _call(data_dir: Any, method: str, path: str, **how: Any) -> dict[str, Any]:
    from gateway.admin.client import call

    return call(data_dir_of(data_dir), method, path, **how)


def _show(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print_record(_flat(record))


def _show_change(record: dict[str, Any], as_json: bool) -> None:
    """A changed team or tier, and whose maximum pause that moves: also that of teams nobody has touched."""
    from gateway.reports.format import seconds

    _show(record, as_json)
    if not as_json:
        for move in record.get("max_pause_moves", ()):
            old, new = ("none" if us is None else seconds(us) for us in (move["from_seconds"], move["to_seconds"]))
            print(f"maximum pause of tier {move['tier']} with an empty queue: {old} -> {new}")


def _show_list(answer: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        print_json(answer)
    else:
        print_table([_flat(row) for row in answer["data"]], title=title)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """A record for people: each limit as a column of its own (no limit is `unlimited`), maximum pauses with their
    units."""
    from gateway.reports.format import count, seconds

    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name == "object" or name.startswith("max_pause_"):
            continue
        if isinstance(value, dict):
            flat |= {inner: "unlimited" if v is None else v for inner, v in value.items()}
        else:
            flat[name] = value
    if "max_pause_seconds" in record:
        full, empty = record["max_pause_seconds"], record["max_pause_empty_queue_seconds"]
        flat[_EMPTY] = None if empty is None else seconds(empty)
        flat[_FULL] = None if full is None else f"{seconds(full)} ({count(record['max_pause_queue'])} requests)"
        flat[_NONE] = record["max_pause_unknown"]
    return flat


def _path(base: str, *parts: str) -> str:
    """A path of the admin API.

    Raises CommandError for a part that cannot be a name. Parts such as '.', '' and 'a/b' would lead to another path, so
    the error says that nothing has this name.
    """
    for part in parts:
        if not _SEGMENT.fullmatch(part):
            raise CommandError(f"there is no {part[:80]!r}", EXIT_NOT_FOUND, "not_found")
    return "/".join([base, *parts])


@team_app.command("create")
def team_create(
    name: Name,
    tier: Annotated[str, typer.Option("--tier", metavar="TIER", help="Its class of service.")] = "silver",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a team."""
    with reporting(as_json):
        _show_change(_call(data_dir, "POST", TEAMS, body={"name": name, "tier": tier}), as_json)


@team_app.command("list")
def team_list(
    archived: Annotated[bool, typer.Option("--archived", help="Archived teams too.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """All teams that are not archived; with --archived, all teams."""
    with reporting(as_json):
        answer = _call(data_dir, "GET", TEAMS, params={"archived": "true"})
        live = [team for team in answer["data"] if team["archived_at"] is None]
        num_archived = len(answer["data"]) - len(live)
        _show_list(answer if archived else answer | {"data": live}, as_json, "teams")
        if num_archived and not archived and not as_json:
            print(f"{num_archived} archived not shown: terazi team list --archived")


@team_app.command("show")
def team_show(name: Name, data_dir: DataDir = None, as_json: Json = False) -> None:
    """One team."""
    with reporting(as_json):
        _show(_call(data_dir, "GET", _path(TEAMS, name)), as_json)


@team_app.command("set")
def team_set(
    name: Name,
    tier: Annotated[str | None, typer.Option("--tier", metavar="TIER", help="Its new class of service.")] = None,
    new_name: Annotated[
        str | None, typer.Option("--name", metavar="NEW", help="Its new name; history follows.")
    ] = None,
    archived: Annotated[
        bool | None, typer.Option("--archive/--restore", help="Refuse its keys, keep its history; or take it back.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change a team; running requests keep their terms."""
    with reporting(as_json):
        given = {"tier": tier, "name": new_name, "archived": archived}
        body = {field: value for field, value in given.items() if value is not None}
        if not body:
            raise CommandError("give at least one of the options, see --help", EXIT_USAGE, "usage")
        _show_change(_call(data_dir, "PATCH", _path(TEAMS, name), body=body), as_json)


@key_app.command("create")
def key_create(
    team: Team,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="What it is for.")] = None,
    expires_at: Annotated[
        str | None,
        typer.Option("--expires-at", metavar="TIME", help="First moment it is refused; a date is its midnight, UTC."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is shown once; only its hash is kept."""
    with reporting(as_json):
        given = {"name": name, "expires_at": expires_at}
        body = {field: value for field, value in given.items() if value is not None}
        answer = _call(data_dir, "POST", _path(TEAMS, team, "keys"), body=body)
        fields = ["id", "key", "team", *(["expires_at"] if answer["expires_at"] else [])]
        _show({field: answer[field] for field in fields}, as_json)
        if not as_json:
            print("Keep the key: it will not be shown again.", file=sys.stderr)


@key_app.command("list")
def key_list(
    team: Annotated[str | None, typer.Option("--team", metavar="TEAM", help="Only this team's.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """All keys by their public ids."""
    with reporting(as_json):
        _show_list(_call(data_dir, "GET", KEYS, params={"team": team} if team else None), as_json, "keys")


@key_app.command("revoke")
def key_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Public id.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Withdraw a key; it is refused within a second."""
    with reporting(as_json):
        _show(_call(data_dir, "POST", _path(KEYS, key_id, "revoke"), body={}), as_json)


@tier_app.command("list")
def tier_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """All tiers, with the maximum pause that the running engine promises their requests."""
    with reporting(as_json):
        answer = _call(data_dir, "GET", TIERS)
        if as_json:
            print_json(answer)
            return
        print_table([_flat(tier) for tier in answer["data"]], _TIER_COLUMNS, title="tiers")
        reasons: dict[str, list[str]] = {}
        for tier in answer["data"]:
            if tier["max_pause_unknown"]:
                reasons.setdefault(tier["max_pause_unknown"], []).append(tier["name"])
        for reason, names in reasons.items():
            print(f"no maximum pause for {', '.join(names)}: {reason}")
        if len(answer["data"]) > sum(map(len, reasons.values())):
            print(
                "A starving request gets its next step within the maximum pause: with an empty queue, none of its team "
                "waits before it;\nwith a full queue, as many as its team may have at once. "
                "A `quota --concurrent` limit lowers it: terazi quota set TEAM --concurrent N"
            )


@tier_app.command("show")
def tier_show(name: Name, data_dir: DataDir = None, as_json: Json = False) -> None:
    """One tier."""
    with reporting(as_json):
        _show(_call(data_dir, "GET", _path(TIERS, name)), as_json)


@tier_app.command("set")
def tier_set(
    name: Name,
    weight: Annotated[Number, typer.Option("--weight", metavar="N", help="Its part of the GPU: 1-1000.")] = None,
    start_level: Annotated[
        Number, typer.Option("--start-level", metavar="N", help="First level of its requests: 0-7.")
    ] = None,
    starving_after: Annotated[Number, typer.Option("--starving-after", metavar="TIME", help="300ms, 1s.")] = None,
    promotion_burst_grants: Annotated[
        Number, typer.Option("--promotion-burst-grants", metavar="N", help="Unused grants kept.")
    ] = None,
    max_queue_seconds: Annotated[
        Number, typer.Option("--max-queue-seconds", metavar="N", help="Longest wait to start.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change a tier; running requests keep their terms."""
    with reporting(as_json):
        given = {"weight": weight, "start_level": start_level, "promotion_burst_grants": promotion_burst_grants}
        given |= {"max_queue_seconds": max_queue_seconds}
        body = {name: _whole(name, text) for name, text in given.items() if text is not None}
        if starving_after is not None:
            body["starving_after_ms"] = _milliseconds(starving_after)
        if not body:
            raise CommandError("give at least one of the options, see --help", EXIT_USAGE, "usage")
        _show_change(_call(data_dir, "PATCH", _path(TIERS, name), body=body), as_json)


@quota_app.command("show")
def quota_show(team: Team, data_dir: DataDir = None, as_json: Json = False) -> None:
    """A team's limits."""
    with reporting(as_json):
        _show(_call(data_dir, "GET", _path(TEAMS, team, "quota")), as_json)


@quota_app.command("set")
def quota_set(
    team: Team,
    requests_per_minute: Annotated[Number, typer.Option("--requests-per-minute", metavar="N|unlimited")] = None,
    tokens_per_minute: Annotated[Number, typer.Option("--tokens-per-minute", metavar="N|unlimited")] = None,
    concurrent: Annotated[Number, typer.Option("--concurrent", metavar="N|unlimited")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Set a team's limits: a whole number (0 is none at all) or the word unlimited. Those not given stay."""
    with reporting(as_json):
        given = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        given |= {"concurrent": concurrent}
        limits = {
            name: None if text == "unlimited" else _whole(name, text, ", or the word unlimited")
            for name, text in given.items()
            if text is not None
        }
        if not limits:
            raise CommandError("give at least one limit, see --help", EXIT_USAGE, "usage")
        _show(_call(data_dir, "PUT", _path(TEAMS, team, "quota"), body=limits), as_json)


def _whole(name: str, text: str, what: str = "") -> int:
    """`text` as a whole number from 0 up. The server checks the upper bound. `what` ends the error's text.

    Raises CommandError for any other text, such as 1e400, 10,000 and NaN.
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        raise CommandError(f"{name}: {text!r} is not a whole number{what}", EXIT_USAGE, "invalid_value")
    if int(text) < 0:
        raise CommandError(
            f"{name}: {text} is negative; give a whole number from 0 up{what}", EXIT_USAGE, "invalid_value"
        )
    return int(text)


def _milliseconds(text: str) -> int:
    from gateway.settings.values import Setting, parse_text

    row = Setting("starving_after", "duration", 0.0, "", least=0.001, most=86400)
    return math.ceil(float(parse_text(row, text, "starving_after")) * 1000)
