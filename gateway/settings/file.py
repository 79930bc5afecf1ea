"""Reads the file of `serve --config FILE`: YAML with safe tags only. Each value has the line on which it stands.

Typical results of a typo are refused: an unknown key (the error names the nearest valid key), a doubled key, and a
value that is not a scalar. `gateway.settings.values` checks the types of values.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tenants.store_url import scrubbed

MAX_CONFIG_BYTES = 1 << 20


class SettingsError(Exception):
    """A setting cannot be used. The text says where the value stands, the value, and the cure.

    A URL's password is hidden in the text, because someone may have put a URL into the wrong setting.
    """

    def __init__(self, text: str) -> None:
        super().__init__(scrubbed(text))


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One scalar value of the file."""

    path: str  # section.key
    value: Any
    where: str  # FILE:LINE
    line: int


def read_config_file(path: Path, known: Sequence[str], sections: Sequence[str]) -> list[ConfigValue]:
    """The file's values, in the file's order. Raises SettingsError, which names the file, the line and the problem.

    `known` are the valid names as `section.key`, `sections` the valid sections.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise SettingsError(f"{path}: it is larger than {MAX_CONFIG_BYTES} bytes; is it a configuration file?")
    try:
        return _read_root(path, raw.decode("utf-8"), known, sections)
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{path}:{line}: {error.problem or 'is not valid YAML'}") from None
    except (yaml.YAMLError, RecursionError):
        raise SettingsError(f"{path}: is not valid YAML") from None


def _read_root(path: Path, text: str, known: Sequence[str], sections: Sequence[str]) -> list[ConfigValue]:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        found: list[ConfigValue] = []
        for section, node, line in _entries(path, "", root):
            if section == "version":
                if _scalar(loader, path, section, node) != 1:
                    raise SettingsError(f"{path}:{line}: version must be 1")
                continue
            if section not in sections:
                raise SettingsError(f"{path}:{line}: unknown key {section}{nearest(section, [*sections, 'version'])}")
            for key, value_node, key_line in _entries(path, section, node):
                full = f"{section}.{key}"
                if full not in known:
                    raise SettingsError(f"{path}:{key_line}: unknown key {full}{nearest(full, known)}")
                value = _scalar(loader, path, full, value_node)
                found.append(ConfigValue(full, value, f"{path}:{key_line}", key_line))
        return found
    finally:
        loader.dispose()


def _entries(path: Path, name: str, node: yaml.Node) -> list[tuple[str, yaml.Node, int]]:
    """The keys of a mapping, with their values and lines.

    Raises SettingsError for a doubled key, where plain YAML readers silently take the last value.
    """
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{path}:{line}: {name or 'the file'} must be a mapping of keys to values")
    seen: dict[str, int] = {}
    entries = []
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in seen:
            full = f"{name}.{key}" if name else key
            raise SettingsError(f"{path}:{key_line}: {full} is given twice, first in line {seen[key]}")
        seen[key] = key_line
        entries.append((key, value_node, key_line))
    return entries


def _scalar(loader: yaml.SafeLoader, path: Path, name: str, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise SettingsError(f"{path}:{node.start_mark.line + 1}: {name} must be one value, not a list or mapping")
    try:
        value = loader.construct_object(node)
    except ValueError:
        value = None
    if value is None:
        raise SettingsError(f"{path}:{node.start_mark.line + 1}: {name} has no value; give one, or leave the key out")
    return value


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean X?` with the known name nearest to `name`; "" when no known name is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
