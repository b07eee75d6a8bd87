"""Objects in a spec: an attack, an aggregator, a worker, a model that is there already, and not only named.

A spec keeps of an object its name and settings wherever these say all there is: an object of the catalog, or of a class
in a module that can be imported. Such a spec is equal to one that named it. Of any other object (of a class that was
written at a prompt, a lambda, a module with its weights) the spec keeps the object itself. A file says of it only that
it was given, `given:NAME`, and nobody can make it again from that.
"""

import dataclasses
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from noisegate import checks
from noisegate.aggregators.function import FromFunction
from noisegate.catalog import GIVEN, OWN, build, find
from noisegate.errors import SpecError
from noisegate.settings import storable

Catalog = Mapping[str, Callable[..., Any]]


def as_part(what: str, value: Any, table: Catalog, role: Any) -> Any:
    """What a spec keeps of a part: a name or a table, or else the object itself. SpecError if it can be no such part.

    A name or a table comes back as it is, and so does None, for the default.
    """
    if value is None or isinstance(value, str | Mapping):
        return value
    if isinstance(value, type):
        raise checks.refuse(what, value, f"is a class; give an object of it, such as {value.__name__}()")
    if not isinstance(value, role):
        if what != "aggregator" or not callable(value):
            rule = "must be a name, a table with name and settings, or an object"
            raise checks.refuse(what, value, f"{rule} ({lacking(value, role)})")
        if not takes_one(value):
            raise checks.refuse(
                what, value, f"must take one argument, the uploads, or be an Aggregator ({lacking(value, role)})"
            )
        path = _path(value)
        return FromFunction(value) if path is None or not is_function(value) else path
    request = _request(what, value, table, role)
    return value if request is None else request


def lacking(value: Any, role: Any) -> str:
    """What an object lacks of a role, in words."""
    members = [*role.__annotations__, *dir(role)]
    lacks = [name for name in members if not name.startswith("_") and not hasattr(value, name)] or ["__call__"]
    return f"it lacks {', '.join(lacks)}; see noisegate.roles.{role.__name__}"


def built(what: str, part: Any, table: Catalog, role: Any) -> Any:
    """The part of a spec as an object."""
    if not isinstance(part, str | Mapping):
        return part
    name = part if isinstance(part, str) else part["name"]
    if what == "aggregator" and ":" in name and is_function(found := find(what, name, table)):
        return FromFunction(found)
    made = build(what, part, table)
    if not isinstance(made, role):
        raise SpecError(f"{what} = {part!r}: {lacking(made, role).removeprefix('it ')}")
    return made


def described(value: Any) -> dict[str, Any]:
    """What a file says of an object that was given: what it is called, and those settings that a file can hold."""
    value = value.function if isinstance(value, FromFunction) else value
    name = value.__name__ if isinstance(value, types.FunctionType) else type(value).__name__
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    settings = {each.name: getattr(value, each.name) for each in fields if each.init and each.name != "name"}
    return {"name": f"{GIVEN}:{name}"} | {key: entry for key, entry in settings.items() if storable(entry)}


def named_model(model: str | nn.Module | None) -> str | None:
    """The model of a spec as a file says it."""
    return f"{GIVEN}:{type(model).__name__}" if isinstance(model, nn.Module) else model


def is_function(value: Any) -> bool:
    """Whether it is a function that makes a vector of uploads, and not one that makes an aggregator of settings."""
    return isinstance(value, types.FunctionType) and takes_one(value) and not _takes(value)


def takes_one(value: Callable[..., Any]) -> bool:
    """Whether it can be called with one argument, as far as that can be known."""
    return _takes(value, None)


def _takes(value: Callable[..., Any], *given: Any) -> bool:
    try:
        inspect.signature(value).bind(*given)
    except TypeError:
        return False
    except ValueError:  # written in C, it does not say
        return bool(given)
    return True


def _request(what: str, value: Any, table: Catalog, role: Any) -> dict[str, Any] | None:
    """A table from which an equal object can be built, now and later; None if there is none."""
    kind = type(value)
    name = next((name for name, entry in table.items() if entry is kind), None) or _path(kind)
    if name is None or not dataclasses.is_dataclass(value):
        return None
    settings: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        found = getattr(value, each.name)
        if not each.init or _is_default(each, found):
            continue
        if isinstance(found, role):
            found = _request(what, found, table, role)
        if not storable(found) or found is None:
            return None
        settings[each.name] = found
    request = {"name": name, **settings}
    try:
        again = build(what, request, table)
    except SpecError:
        return None
    return request if type(again) is kind and again == value else None  # plain settings, which compare


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    try:
        return default is value or (type(default) is type(value) and bool(default == value))
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays do not compare
        return False


def _path(value: Any) -> str | None:
    """`package.module:Name` of a class or function that another process can import; None if it cannot."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or module.startswith(("__", OWN)) or not name.isidentifier():
        return None
    try:
        lasting = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return None
    return f"{module}:{name}" if lasting and getattr(sys.modules.get(module), name, None) is value else None
