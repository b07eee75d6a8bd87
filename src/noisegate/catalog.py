"""Names in a spec become objects here. A catalog is a plain dict; `package.module:Name` loads a stranger's.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Krum:
...     byzantine: int = 1
>>> build("aggregator", {"name": "krum", "byzantine": 4}, {"krum": Krum})
Krum(byzantine=4)
>>> build("aggregator", {"name": "krum", "byzantin": 4}, {"krum": Krum})
Traceback (most recent call last):
noisegate.errors.SpecError: aggregator.byzantin = 4: 'krum' has no such setting (did you mean 'byzantine'?); choose \
from byzantine
"""

import dataclasses
import importlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError

Table = Mapping[str, Callable[..., Any]]


def build(what: str, request: str | Mapping[str, Any], table: Table) -> Any:
    """The object that `request` (a name, or a table with `name` and settings) asks for."""
    settings = settle(what, request, table)
    name = settings.pop("name")
    kind = find(what, name, table)
    for key, role in setting_types(kind).items():
        if key in settings and _is_role(role):
            settings[key] = build(f"{what}.{key}", settings[key], table)
    try:
        return kind(**settings)
    except SpecError as error:
        raise SpecError(f"{what} {name!r}: {error}") from None
    except TypeError as error:
        raise SpecError(f"{what} = {name!r}: cannot be made ({error})") from None


def settle(what: str, request: str | Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The request as a table with `name` and settings of the right types: one form for equal requests.

    A setting whose type is a role (an attack that wraps an attack) is a request itself. None stands for the default.
    """
    settings = {"name": request} if isinstance(request, str) else dict(request)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"{what} = {request!r}: needs a name; choose from {', '.join(table)}")
    types_of = setting_types(find(what, name, table))
    settled: dict[str, Any] = {"name": name}
    for key, value in settings.items():
        if key not in types_of:
            choices = ", ".join(types_of) or "nothing: it takes no settings"
            raise SpecError(
                f"{what}.{key} = {value!r}: {name!r} has no such setting{checks.guess(key, types_of)}; "
                f"choose from {choices}"
            )
        if _is_role(types_of[key]):
            if not isinstance(value, str | Mapping):
                raise SpecError(f"{what}.{key} = {value!r}: must be a name, or a table with name and settings")
            settled[key] = settle(f"{what}.{key}", value, table)
        elif (fitting := typed(f"{what}.{key}", value, types_of[key])) is not None:
            settled[key] = fitting
    return settled


def _is_role(kind: Any) -> bool:
    """Whether a type is one of the protocols of views.py."""
    return bool(getattr(kind, "_is_protocol", False))


def setting_types(kind: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a catalog entry and their types."""
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def typed(key: str, value: Any, kind: Any) -> Any:
    """`value` as type `kind`, or a SpecError that names the key, the value and the type. Only int -> float converts."""
    if kind is Any:
        return value
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        for option in typing.get_args(kind):
            try:
                return typed(key, value, option)
            except SpecError:
                continue
    elif typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if type(value) in [type(choice) for choice in choices if choice == value]:  # True and 1.0 equal 1
            return value
        words = [choice for choice in choices if isinstance(choice, str)]
        raise SpecError(
            f"{key} = {value!r}: unknown{checks.guess(value, words)}; choose from {', '.join(map(repr, choices))}"
        )
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise SpecError(f"{key}: a number of {len(str(value))} digits is too large") from None
    else:
        base = typing.get_origin(kind) or kind
        if isinstance(base, type) and isinstance(value, base) and not (base is int and isinstance(value, bool)):
            return value
    raise SpecError(f"{key} = {value!r}: must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    base = typing.get_origin(kind) or kind
    if base is not kind and issubclass(base, Mapping):
        return "a table"
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def find(what: str, name: str, table: Table) -> Callable[..., Any]:
    """The entry of that name, or the stranger's class that it is the path of."""
    if ":" in name:
        return _stranger(what, name)
    if "." in name and name not in table:
        raise SpecError(f"{what} = {name!r}: unknown; to load your own, write package.module:Name, with a colon")
    checks.one_of(table, **{what: name})
    return table[name]


def _stranger(what: str, path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SpecError(
            f"{what} = {path!r}: cannot be loaded ({error}); write package.module:Name, with its folder on PYTHONPATH"
        ) from None
    if not callable(found):
        raise SpecError(f"{what} = {path!r}: is not a class")
    return typing.cast(Callable[..., Any], found)
