"""The values of the server's settings. A flag wins over the environment, that over the file, that over the default.

`gateway.settings.table` has one row for each setting. `docs/reference.md` lists the same rows, and a test compares the
two. Teams, tiers and quotas are not settings: they live in the database. A wrong value stops the start with a
`SettingsError`, which says where the value stands, the value and the cure.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gateway.prepare.body_bounds import body_bounds
from gateway.settings.file import ConfigValue, SettingsError, nearest, read_config_file
from gateway.settings.table import SETTINGS as SETTINGS
from gateway.settings.table import Setting as Setting
from tenants import store_url
from tenants.errors import Invalid

CONFIG_ENV = "TERAZI_CONFIG"
_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
# For a Service NAME, Kubernetes sets variables in every pod: NAME_PORT=tcp://10.96.0.20:8081, NAME_SERVICE_HOST...
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+", re.ASCII)
_SERVICE_NAME = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Settings:
    """The server's settings, read from all sources. Sizes are bytes, durations are seconds.

    `sources` says where each value comes from, such as `default` or `file /etc/terazi.yaml:3`.
    """

    data_dir: Path
    host: str
    port: int
    admin_host: str
    admin_port: int
    max_body_bytes: int
    process_above_bytes: int
    prepare_team_bytes: int
    prepare_total_bytes: int
    prepare_waiting_requests: int
    prepare_wait_seconds: float
    prepare_run_seconds: float
    prepare_idle_seconds: float
    prepare_memory_bytes: int
    max_connections: int
    drain_timeout: float
    early_headers_after: float
    keep_alive_timeout: float
    store_url: str
    store_lock_grace: float
    journal_fsync_interval: float
    on_error: str
    engine: str
    engine_socket: str
    engine_short_life: float
    engine_short_lives_max: int
    engine_restart_pause_max: float
    model: str
    policy: str
    coast: bool
    dtype: str
    device: str
    num_threads: int
    max_batch_size: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    prefill_chunk_time: float
    step_time_max: float
    isolation: str
    block_size: int
    kv_memory: int
    host_kv_memory: int
    memory_preemption: str
    swap_benefit: int
    swap_min_run_steps: int
    swap_link_percent: int
    promotion_percent: int
    max_queued_requests: int
    default_max_tokens: int
    deterministic: bool
    kv_canary: bool
    step_log: str
    step_log_max_bytes: int
    cache_dir: str
    log_format: str
    log_level: str
    refusal_lines_per_minute: int
    sources: Mapping[str, str]

    @property
    def database_url(self) -> str:
        """The store's URL in the spelling of the drivers: `store_url`, or if that is empty a SQLite file in the data
        directory."""
        if self.store_url:
            return store_url.normalised(self.store_url)
        from tenants.database import sqlite_url  # SQLAlchemy is not needed to read settings

        return sqlite_url(self.data_dir / "terazi.db")


# YAML keys that set a pair of settings.
LISTEN_PATHS = {"server.listen": ("host", "port"), "server.admin_listen": ("admin_host", "admin_port")}
SECTIONS = ("server", "store", "engine", "logging")


def setting(name: str) -> Setting:
    """The row of the setting `name`. Raises KeyError for an unknown name."""
    return _BY_NAME[name]


_BY_NAME = {s.name: s for s in SETTINGS}
_BY_PATH = {s.path: s for s in SETTINGS if s.path}


def load(flags: Mapping[str, Any], environment: Mapping[str, str], config_file: Path | None = None) -> Settings:
    """The settings from all sources: flag > environment > file > default. A flag that is None was not given.

    Raises SettingsError, which says where the value stands, the value and the cure.
    """
    values: dict[str, Any] = {s.name: s.default for s in SETTINGS}
    sources = dict.fromkeys(values, "default")
    config_file = config_file or (Path(environment[CONFIG_ENV]) if environment.get(CONFIG_ENV) else None)
    if config_file is not None:
        for name, value, source in _from_file(config_file):
            values[name], sources[name] = value, source
    _refuse_unknown_environment(environment)
    for row in SETTINGS:
        text = environment.get(row.env)
        if text is not None and not _is_of_kubernetes(row.env, text):
            values[row.name], sources[row.name] = parse_text(row, text, row.env), f"environment {row.env}"
    for name, given in flags.items():
        if given is not None:
            row = _BY_NAME[name]
            values[name] = parse_text(row, str(given), row.flag or name)
            sources[name] = f"flag {row.flag}"
    values["data_dir"] = _directory(values["data_dir"], sources["data_dir"])
    result = Settings(**values, sources=sources)
    _check_together(result)
    return result


def _directory(text: str, source: str) -> Path:
    """The data directory as an absolute path.

    Raises SettingsError when `text` begins with ~ and the user has no home directory, and when `text` is relative and
    the working directory is gone.
    """
    try:
        # With an empty HOME, ~ would become the root directory.
        if text.startswith("~") and os.environ.get("HOME") == "":
            raise RuntimeError
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise SettingsError(
            f"data_dir ({source}): this user has no home directory for {text}; "
            "give --data-dir DIR or set TERAZI_DATA_DIR"
        ) from None
    except FileNotFoundError:
        raise SettingsError(
            f"data_dir ({source}): {text} begins in a directory that is gone; give an absolute path"
        ) from None


def _from_file(path: Path) -> list[tuple[str, Any, str]]:
    known = [*_BY_PATH, *LISTEN_PATHS]
    found: list[tuple[str, Any, str]] = []
    set_at: dict[str, str] = {}
    for item in read_config_file(path, known, SECTIONS):
        source = f"file {path}:{item.line}"
        if item.path in LISTEN_PATHS:
            host_name, port_name = LISTEN_PATHS[item.path]
            host, port = _parse_listen(item)
            pairs = [(host_name, host), (port_name, port)]
        else:
            row = _BY_PATH[item.path]
            pairs = [(row.name, _from_yaml(row, item))]
        for name, value in pairs:
            if name in set_at:
                raise SettingsError(
                    f"{item.where}: {item.path} sets {name} again, {set_at[name]} did so; keep one of them"
                )
            set_at[name] = item.path
            found.append((name, value, source))
    return found


def _from_yaml(row: Setting, item: ConfigValue) -> Any:
    """The value of a setting in the file. Raises SettingsError if the value has another type: "60" is not 60."""
    value, where = item.value, f"{item.where}: {item.path}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    wanted: dict[str, tuple[bool, str]] = {
        "int": (isinstance(value, int) and not isinstance(value, bool), "a whole number without quotes"),
        "bool": (isinstance(value, bool), "true or false"),
        "size": (isinstance(value, (int, str)) and not isinstance(value, bool), "a size such as 2GiB"),
        "duration": (isinstance(value, str) or (is_number and value == 0), "a time with its unit such as 15s"),
    }
    fits, description = wanted.get(row.kind, (isinstance(value, str), "text"))
    if not fits:
        raise SettingsError(f"{where}: {value!r} is not {description}")
    if isinstance(value, (bool, int)) and row.kind in ("bool", "int", "size"):
        return value if row.kind == "bool" else _in_range(row, value, where)
    return parse_text(row, str(value), where)


def parse_text(row: Setting, text: str, where: str) -> Any:
    """The value of a setting that was given as text, by a flag or a variable. `where` begins the error's text.

    Sizes become bytes, durations become seconds. Raises SettingsError.
    """
    parser: Callable[[Setting, str, str], Any] = {
        "int": _parse_int,
        "bool": _parse_bool,
        "size": _parse_size,
        "duration": _parse_duration,
        "choice": _parse_choice,
    }.get(row.kind, _parse_str)
    return parser(row, text, where)


def _parse_str(row: Setting, text: str, where: str) -> str:
    if not text.strip() and row.default != "":
        raise SettingsError(f"{where}: {text!r} is empty; give a value, or leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{where}: it is not UTF-8 text") from None
    if "\0" in text:
        raise SettingsError(f"{where}: it has a NUL")
    return text


def _parse_int(row: Setting, text: str, where: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text, re.ASCII):
        raise SettingsError(f"{where}: {text!r} is not a whole number")
    return int(_in_range(row, int(text), where))


def _parse_bool(row: Setting, text: str, where: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise SettingsError(f"{where}: {text!r} is not true or false")
    return text.lower() == "true"


def _parse_choice(row: Setting, text: str, where: str) -> str:
    if text not in row.choices:
        raise SettingsError(f"{where}: {text!r} is not one of {', '.join(row.choices)}{nearest(text, row.choices)}")
    return text


def _parse_size(row: Setting, text: str, where: str) -> int:
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if not found or found[2].lower() not in _SIZE_UNITS:
        raise SettingsError(f"{where}: {text!r} is not a size such as 2GiB or 512MiB")
    return int(_in_range(row, int(float(found[1]) * _SIZE_UNITS[found[2].lower()]), where))


def _parse_duration(row: Setting, text: str, where: str) -> float:
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found and float(found[1]) == 0 and not found[2]:
        return float(_in_range(row, 0.0, where))
    if not found or found[2].lower() not in _DURATION_UNITS:
        raise SettingsError(f"{where}: {text!r} is not a time with its unit, such as 15s or 300ms")
    return float(_in_range(row, float(found[1]) * _DURATION_UNITS[found[2].lower()], where))


def _in_range(row: Setting, value: float, where: str) -> float:
    if not row.least <= value <= row.most or not math.isfinite(value):
        limit = f"at least {row.least:g}" if value < row.least else f"at most {row.most:g}"
        raise SettingsError(f"{where}: {value} is out of range, it must be {limit}")
    return value


def _parse_listen(item: ConfigValue) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:\[\]\s]+)):([0-9]{1,5})", str(item.value))
    if not found or int(found[3]) > 65535:
        raise SettingsError(
            f"{item.where}: {item.path}: {item.value!r} is not host:port, such as 0.0.0.0:8080 or [::]:8080"
        )
    return found[1] or found[2], int(found[3])


def _check_together(settings: Settings) -> None:
    """Check the rules that bind several settings. Raises SettingsError."""
    if settings.port and settings.port == settings.admin_port:
        raise SettingsError(f"port and admin_port are both {settings.port}; give the admin listener a port of its own")
    try:
        body_bounds(
            max_body_bytes=settings.max_body_bytes,
            small_bytes=settings.process_above_bytes,
            team_bytes=settings.prepare_team_bytes,
            total_bytes=settings.prepare_total_bytes,
        )
    except ValueError as error:
        raise SettingsError(
            f"max_body_bytes, process_above_bytes, prepare_team_bytes and prepare_total_bytes: {error}"
        ) from None
    if settings.store_url:
        try:
            store_url.normalised(settings.store_url)
        except Invalid as error:
            raise SettingsError(f"store_url ({settings.sources['store_url']}): {error.message}") from None


def _refuse_unknown_environment(environment: Mapping[str, str]) -> None:
    """Raises SettingsError for a variable whose name is close to one of ours, which is most likely a typo.

    Other names with TERAZI_ may belong to somebody else, for example to a Kubernetes Service.
    """
    known = [s.env for s in SETTINGS] + [CONFIG_ENV]
    for name, text in environment.items():
        if not name.startswith("TERAZI_") or name in known or _is_of_kubernetes(name, text):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if close:
            raise SettingsError(f"environment {name} is unknown; did you mean {close[0]}?")


def _is_of_kubernetes(name: str, text: str) -> bool:
    """Whether Kubernetes has set this variable, for a Service called `terazi` or `terazi-...`, and not the operator."""
    if name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text):
        return True
    return _SERVICE_NAME.fullmatch(name) is not None


def shown(row: Setting, value: Any) -> str:
    """A setting's value as a person would write it, with the unit of a size or a time."""
    if row.kind == "size":
        for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value and value % factor == 0:
                return f"{value // factor}{unit}"
    if row.kind == "duration":
        return f"{value:g}s" if value >= 1 or not value else f"{value * 1000:g}ms"
    if row.kind == "bool":
        return "true" if value else "false"
    return str(value)


def as_rows(settings: Settings) -> list[dict[str, Any]]:
    """Every setting with its value and source, for `config show`. The password in the store's URL is hidden."""
    rows = []
    for field in fields(settings):
        if field.name == "sources":
            continue
        value = getattr(settings, field.name)
        if field.name == "store_url":
            value = store_url.masked(value)
        row = _BY_NAME[field.name]
        rows.append(
            {
                "name": row.name,
                "value": str(value) if isinstance(value, Path) else value,
                "source": settings.sources[row.name],
                "path": row.path,
                "env": row.env,
                "flag": row.flag,
            }
        )
    return rows
