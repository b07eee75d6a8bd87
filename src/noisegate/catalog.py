"""Names in a spec become objects here. A catalog is a plain dict; `package.module:Name` and `file.py:Name` are plugins.

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
import functools
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.streams import for_a_while, stream

Table = Mapping[str, Callable[..., Any]]

OWN = "noisegate_own_"
"""What the module of a user's own file is called, before its name."""

GIVEN = "given"
"""`given:NAME` stands in a file for an object that only the program had that made the file."""


def build(what: str, request: str | Mapping[str, Any], table: Table) -> Any:
    """The object that `request` (a name, or a table with `name` and settings) asks for."""
    settings = settle(what, request, table)
    kind = find(what, settings["name"], table)
    for key, role in types_of(what, settings["name"], kind).items():
        if key in settings and _is_role(role):
            settings[key] = build(f"{what}.{key}", settings[key], table)
    return made(what, settings, kind)


def made(what: str, settings: Mapping[str, Any], kind: Callable[..., Any]) -> Any:
    """An object of that kind with the settings of a table that names it."""
    name, given = settings["name"], {key: value for key, value in settings.items() if key != "name"}
    with calling(what, name, "cannot be made"):
        try:
            return kind(**given)
        except SpecError as error:
            raise SpecError(f"{what} {checks.shown(name)}: {error}") from None
        except TypeError as error:
            raise SpecError(f"{what} = {checks.shown(name)}: cannot be made ({checks.told(error)})") from None


def settle(what: str, request: str | Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The request as a table with `name` and settings of the right types: one form for equal requests.

    A setting whose type is a role (an attack that wraps an attack) is a request itself. None stands for the default.
    """
    settings = {"name": request} if isinstance(request, str) else dict(request)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise checks.refuse(what, request, f"needs a name; choose from {', '.join(table)}")
    known = types_of(what, name, find(what, name, table))
    settled: dict[str, Any] = {"name": name}
    for key, value in settings.items():
        if key not in known:
            choices = ", ".join(known) or "nothing: it takes no settings"
            rule = f"{checks.shown(name)} has no such setting{checks.guess(key, known)}; choose from {choices}"
            raise checks.refuse(f"{what}.{key}", value, rule)
        if _is_role(known[key]):
            if not isinstance(value, str | Mapping):
                raise checks.refuse(f"{what}.{key}", value, "must be a name, or a table with name and settings")
            settled[key] = settle(f"{what}.{key}", value, table)
        elif (fitting := typed(f"{what}.{key}", value, known[key])) is not None:
            settled[key] = fitting
    return settled


def _is_role(kind: Any) -> bool:
    """Whether a type is one of the protocols of views.py."""
    return bool(getattr(kind, "_is_protocol", False))


def types_of(what: str, name: str, kind: Callable[..., Any]) -> dict[str, Any]:
    """The settings of the entry of that name and their types."""
    with calling(what, name, "its settings cannot be read"):
        return setting_types(kind)


def setting_types(kind: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a catalog entry and their types."""
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def typed(key: str, value: Any, kind: Any) -> Any:
    """`value` as type `kind`, or a SpecError that names the key, the value and the type. Only int -> float converts."""
    if isinstance(value, int) and abs(value) > checks.LARGEST:  # which Python may not even write
        raise checks.refuse(key, value, f"is too large; must be at most {checks.LARGEST}")
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
        raise checks.refuse(
            key, value, f"unknown{checks.guess(value, words)}; choose from {', '.join(map(repr, choices))}"
        )
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    else:
        base = typing.get_origin(kind) or kind
        if isinstance(base, type) and isinstance(value, base) and not (base is int and isinstance(value, bool)):
            return value
    raise checks.refuse(key, value, f"must be {_describe(kind)}")


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
    """The entry of that name, or the plugin's class that it is the path of."""
    if ":" in name:
        return _plugin(what, name)
    if "." in name and name not in table:
        raise checks.refuse(
            what, name, "unknown; to load your own, write package.module:Name or file.py:Name, with a colon"
        )
    checks.one_of(table, **{what: name})
    return table[name]


def is_own(name: Any) -> bool:
    """Whether a name is the path of somebody's own code. No entry of a catalog has a colon in its name."""
    return isinstance(name, str) and ":" in name


def load(what: str, path: str) -> Any:
    """What `package.module:name` or `file.py:name` is the path of. Its code runs here.

    What it draws from torch's global generator when it is loaded, such as a module's weights, is the same every time.
    """
    place, _, attribute = path.rpartition(":")
    if place == GIVEN:
        rule = f"was an object in Python, which a file cannot hold; give it again, as in Spec({what}=...)"
        raise checks.refuse(what, path, rule)
    with for_a_while(stream(0, "own code")):
        if place.endswith(".py"):
            return _of_file(what, path, Path(place), attribute)
        with calling(what, path, "cannot be loaded", "; write package.module:Name, with its folder on PYTHONPATH"):
            return getattr(importlib.import_module(place), attribute)


def _plugin(what: str, path: str) -> Callable[..., Any]:
    found = load(what, path)
    if not callable(found):
        raise checks.refuse(what, path, "is neither a function nor a class")
    return typing.cast(Callable[..., Any], found)


def _of_file(what: str, path: str, file: Path, attribute: str) -> Any:
    """What a user's own file calls so."""
    try:
        changed = file.stat().st_mtime_ns
    except OSError as error:
        raise checks.refuse(what, path, f"cannot be loaded ({error.strerror})") from None
    with calling(what, path, "cannot be loaded"):
        module = _run_file(str(file.resolve()), changed)
    if not hasattr(module, attribute):
        raise checks.refuse(what, path, f"the file has no function, class or module {attribute!r}")
    return getattr(module, attribute)


@functools.lru_cache(maxsize=16)
def _run_file(path: str, changed: int) -> Any:
    """The module of a file, which is run once. changed: when the file was written."""
    called = OWN + Path(path).stem
    about = importlib.util.spec_from_file_location(called, path)
    if about is None or about.loader is None:
        raise ImportError("is not a file of Python")
    module = importlib.util.module_from_spec(about)
    sys.modules[called] = module  # which dataclasses and pickle look for
    about.loader.exec_module(module)
    return module


@contextmanager
def calling(what: str, path: str, problem: str, remedy: str = "") -> Iterator[None]:
    """Whatever a plugin's code raises here, also to end the process, is a SpecError. Ctrl-C is not the plugin's."""
    if not is_own(path):
        yield
        return
    try:
        yield
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # anyone's code may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise checks.refuse(what, path, f"{problem} ({kind}{checks.told(error)}){remedy}") from None
