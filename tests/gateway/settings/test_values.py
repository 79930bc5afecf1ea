"""Settings: precedence, and that a wrong value stops the start with where it stands and the fix."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.models.store import ModelStoreError, cache_root
from gateway.cli.main import app
from gateway.settings.file import SettingsError
from gateway.settings.values import SETTINGS, Setting, as_rows, load


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "terazi.yaml"
    path.write_text(text)
    return path


def test_default_values_are_those_of_the_table() -> None:
    settings = load({}, {})
    for row in SETTINGS:
        if row.name != "data_dir":
            assert getattr(settings, row.name) == row.default
    assert settings.data_dir.is_absolute()
    assert set(settings.sources.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "server:\n  port: 1001\n  host: 0.0.0.0\nengine:\n  max_batch_size: 3\n  model: m-file\n")
    environment = {"TERAZI_PORT": "1002", "TERAZI_MAX_BATCH_SIZE": "4", "TERAZI_DATA_DIR": str(tmp_path)}
    settings = load({"port": "1003", "host": None}, environment, file)
    assert (settings.port, settings.max_batch_size, settings.model, settings.host) == (1003, 4, "m-file", "0.0.0.0")
    assert settings.policy == "eg-mlfq"
    assert settings.sources["port"] == "flag --port"
    assert settings.sources["max_batch_size"] == "environment TERAZI_MAX_BATCH_SIZE"
    assert settings.sources["model"] == f"file {file}:6"
    assert settings.sources["policy"] == "default"


def test_the_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "engine: {policy: fcfs}\n")
    assert load({}, {"TERAZI_CONFIG": str(file)}).policy == "fcfs"


def test_sizes_durations_and_listen_addresses(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "version: 1\n"
        'server: {listen: "[::]:8090", admin_listen: 127.0.0.1:8091, max_body_bytes: 8388608, drain_timeout: 1500ms}\n'
        "store: {journal_fsync_interval: 50ms, on_error: deny}\n"
        "engine: {kv_memory: 2GiB, host_kv_memory: 1.5 MiB, deterministic: true}\n"
        "logging: {format: json}\n",
    )
    settings = load({}, {}, file)
    assert (settings.host, settings.port, settings.admin_host, settings.admin_port) == ("::", 8090, "127.0.0.1", 8091)
    assert (settings.kv_memory, settings.host_kv_memory) == (2 << 30, 3 << 19)
    assert (settings.drain_timeout, settings.journal_fsync_interval) == (1.5, 0.05)
    assert settings.deterministic is True
    assert settings.max_body_bytes == 8 << 20


@pytest.mark.case("D11")
def test_a_near_miss_in_the_environment_is_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean TERAZI_MAX_BATCH_SIZE"):
        load({}, {"TERAZI_MAX_BATCH_SISE": "4"})
    # What Kubernetes sets for a service called "terazi" is nobody's typo.
    kubernetes = {
        "TERAZI_PORT": "tcp://10.0.0.1:8080",
        "TERAZI_SERVICE_PORT": "8080",
        "TERAZI_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    }
    assert load({}, kubernetes).port == 8080


PORTS = [row for row in SETTINGS if row.env.endswith("_PORT")]
SERVICES = ["TERAZI", "TERAZI_ADMIN", "TERAZI_ENGINE", "TERAZI_HOST", "TERAZI_MODEL", "TERAZI_POLICY", "TERAZI_STORE"]


def kubernetes(service: str, address: str) -> dict[str, str]:
    """What Kubernetes sets in each pod for a Service with one port called `http`."""
    protocol, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    pair = f"{service}_PORT_{port}_{protocol.upper()}"
    return {
        f"{service}_SERVICE_HOST": host,
        f"{service}_SERVICE_PORT": port,
        f"{service}_SERVICE_PORT_HTTP": port,
        f"{service}_PORT": address,
        pair: address,
        f"{pair}_PROTO": protocol,
        f"{pair}_PORT": port,
        f"{pair}_ADDR": host,
    }


@pytest.mark.case("H26")
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "address", ["tcp://10.96.0.20:8081", "udp://10.96.0.20:53", "tcp://[fd00::14]:8081", "tcp://fd00::14:8081"]
)
def test_the_variables_of_a_kubernetes_service_are_skipped(service: str, address: str) -> None:
    settings = load({}, kubernetes(service, address))
    assert set(settings.sources.values()) == {"default"}
    assert (settings.port, settings.admin_port) == (8080, 8081)


@pytest.mark.case("H26")
@pytest.mark.parametrize("row", PORTS, ids=lambda row: row.env)
@pytest.mark.parametrize("text", ["tcp", "tcp://10.96.0.20", "tcp://", "http://10.0.0.1:80", "8081/tcp", "70000", ""])
def test_a_wrong_port_beside_them_is_still_refused(row: Setting, text: str) -> None:
    environment = kubernetes("TERAZI_ADMIN", "tcp://10.96.0.20:8081") | {row.env: text}
    with pytest.raises(SettingsError, match=row.env):
        load({}, environment)
    with pytest.raises(SettingsError, match="did you mean TERAZI_ADMIN_PORT"):
        load({}, {"TERAZI_ADMIN_PROT": "8081"})


@pytest.mark.case("H29")
@pytest.mark.parametrize("home", ["", None])
def test_no_home_is_one_line_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # has no entry
    else:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(SettingsError, match=r"^data_dir \(default\): this user has no home .* TERAZI_DATA_DIR$"):
        load({}, {})
    assert load({"data_dir": tmp_path}, {}).data_dir == tmp_path
    shown = CliRunner().invoke(app, ["config", "show"])
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    with pytest.raises(ModelStoreError, match=r"no home directory for the cache .*; set TERAZI_CACHE_DIR"):
        cache_root("")
    assert cache_root(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["~nobody-here/data", "~"])
def test_a_tilde_that_leads_nowhere_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", "")
    with pytest.raises(SettingsError, match=r"data_dir .flag --data-dir.: this user has no home"):
        load({"data_dir": name}, {})


@pytest.mark.parametrize("text", ["", "1e3", "١", "0x10", "8 080", "8,080", "99999999999999999999"])
def test_numbers_as_text_are_plain_digits(text: str) -> None:
    with pytest.raises(SettingsError, match=r"TERAZI_PORT: .* is not a whole number"):
        load({}, {"TERAZI_PORT": text})


def test_one_port_for_both_listeners_is_refused() -> None:
    with pytest.raises(SettingsError, match="both 9000"):
        load({"port": "9000", "admin_port": "9000"}, {})


@pytest.mark.case("H32")
def test_config_show_masks_the_password_of_the_store() -> None:
    rows = {row["name"]: row for row in as_rows(load({}, {"TERAZI_STORE_URL": "postgresql://u:s3cret@db/x"}))}
    assert rows["store_url"]["value"] == "postgresql://u:***@db/x"
    assert rows["store_url"]["source"] == "environment TERAZI_STORE_URL"
    assert set(rows) == {row.name for row in SETTINGS}


@pytest.mark.case("T03")
def test_when_body_bounds_do_not_fit_then_the_start_stops() -> None:
    fitting = {
        "TERAZI_MAX_BODY_BYTES": "3MiB",
        "TERAZI_PREPARE_TEAM_BYTES": "4MiB",
        "TERAZI_PREPARE_TOTAL_BYTES": "8MiB",
    }
    settings = load({}, fitting)
    assert (settings.prepare_team_bytes, settings.prepare_total_bytes) == (4 << 20, 8 << 20)
    for name, value in (
        ("TERAZI_MAX_BODY_BYTES", f"{(3 << 20) + 1}"),
        ("TERAZI_PREPARE_TOTAL_BYTES", f"{(8 << 20) - 1}"),
        ("TERAZI_PROCESS_ABOVE_BYTES", f"{(1 << 20) + 1}"),
    ):
        with pytest.raises(SettingsError, match="prepare_team_bytes and prepare_total_bytes"):
            load({}, {**fitting, name: value})
    assert load({}, {"TERAZI_MAX_BODY_BYTES": "1GiB"}).prepare_team_bytes == 0, "the defaults fit whatever is largest"
