"""The configuration file: what cannot be read is refused with where it stands."""

from pathlib import Path

import pytest

from gateway.settings.file import SettingsError
from gateway.settings.values import load
from tests.gateway.settings.test_values import write


@pytest.mark.case("D11")
@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("engine:\n  max_batch_sise: 4\n", 2, "did you mean engine.max_batch_size?"),
        ("engin:\n  model: x\n", 1, "did you mean engine?"),
        ("tiers:\n  gold: 1\n", 1, "unknown key tiers"),
        ("logging:\n  bodies: none\n", 2, "unknown key logging.bodies"),
        ("server:\n  port: 1\nserver:\n  port: 2\n", 3, "server is given twice, first in line 1"),
        ("server:\n  port: 1\n  host: a\n  port: 1\n", 4, "server.port is given twice, first in line 2"),
        ('engine:\n  max_batch_size: "60"\n', 2, "'60' is not a whole number without quotes"),
        ("engine:\n  max_batch_size: 6.5\n", 2, "6.5 is not a whole number"),
        ("engine:\n  max_batch_size: true\n", 2, "True is not a whole number"),
        ("engine:\n  max_batch_size: 0\n", 2, "must be at least 1"),
        ("engine:\n  max_batch_size: -1\n", 2, "must be at least 1"),
        ("engine:\n  max_batch_size: .nan\n", 2, "is not a whole number"),
        ("engine:\n  kv_memory: 2Gib2\n", 2, "is not a size"),
        ("engine:\n  kv_memory: .inf\n", 2, "is not a size"),
        ("engine:\n  policy: eg-mlqf\n", 2, "did you mean eg-mlfq?"),
        ("engine:\n  deterministic: 1\n", 2, "1 is not true or false"),
        ("server:\n  drain_timeout: 60\n", 2, "60 is not a time with its unit"),
        ("server:\n  drain_timeout: -60s\n", 2, "is not a time with its unit"),
        ("server:\n  port: 70000\n", 2, "at most 65535"),
        ("server:\n  listen: localhost\n", 2, "is not host:port"),
        ("server:\n  port: 1\n  listen: a:2\n", 3, "server.listen sets port again, server.port did so"),
        ("server:\n  port:\n", 2, "server.port has no value"),
        ("server: 8080\n", 1, "server must be a mapping"),
        ("server:\n  port: [1]\n", 2, "must be one value"),
        ("- 1\n", 1, "must be a mapping"),
        ("server:\n\tport: 1\n", 2, "cannot start any token"),
        ("version: 2\n", 1, "version must be 1"),
    ],
)
def test_a_typo_in_the_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        load({}, {}, file)
    assert str(refused.value).startswith(f"{file}:{line}: ")
    assert said in str(refused.value)


@pytest.mark.case("S05")
@pytest.mark.parametrize("tag", ["!!python/object/apply:os.getcwd []", "!!python/name:os.system ''", "!env HOME"])
def test_yaml_tags_run_nothing(tmp_path: Path, tag: str) -> None:
    with pytest.raises(SettingsError):
        load({}, {}, write(tmp_path, f"engine:\n  model: {tag}\n"))


def test_a_file_that_is_missing_or_no_text_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load({}, {}, tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load({}, {}, binary)
