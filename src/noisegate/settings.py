"""Files of settings: TOML that anybody may have written, read as plain values."""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError

MOST_BYTES, MOST_DEPTH = 2**20, 32
"""Of a file of settings."""


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, not yet checked."""
    where = checks.plain(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # it may never end
    except OSError as error:
        raise SpecError(f"{where}: cannot be read ({error.strerror}); give a TOML file, or flags only") from None
    if len(content) > MOST_BYTES:
        raise SpecError(f"{where}: is longer than {MOST_BYTES} bytes; give a TOML file of settings")
    try:
        settings = tomllib.loads(content.decode())
    except RecursionError:
        raise SpecError(f"{where}: is nested too deeply; settings are tables of values") from None
    except ValueError as error:  # also of text that is not UTF-8, and of numbers with thousands of digits
        raise SpecError(f"{where}: is not valid TOML ({checks.plain(str(error))[: checks.MOST_SHOWN]})") from None
    level: list[Any] = [settings]
    for _ in range(MOST_DEPTH):
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in level if isinstance(value, dict | list)]
    if level:
        raise SpecError(f"{where}: is nested more than {MOST_DEPTH} deep; settings are tables of values")
    return settings


def storable(value: Any) -> bool:
    """Whether a file can hold a value and give the same back."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and storable(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(storable(entry) for entry in value)
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)) or value is None


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's texts are TOML's but for that


def _key(key: str) -> str:
    """A key of a table, in quotes where it needs them."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml(key)
