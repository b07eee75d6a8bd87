"""What a run's uploads are made of, as one digest: data, module, weights, loss, and code that is not noisegate's.

The digest is in the name of every noise and batch stream (`Federation.name`). So two runs that differ in any of these
never share noise, whatever their specs say. It is a function of private data: it is written nowhere.

The digest of a function is over its bytecode, its constants, what it closes over, and the globals that it names. The
digest of a class is over its methods; that of an object is over its class and what pickle would keep of it. Code of
noisegate, torch and the other libraries that a run needs is known by its name. Anything else (a lock, an open file)
has no digest. Then the digest is of fresh random bytes: such a run shares noise with no other and cannot be repeated.
A `label` can be given in place of code that has no digest.
"""

import copyreg
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, ClassVar, Literal, Union

import numpy as np
import torch
from torch import Tensor, nn

from noisegate.data import Dataset
from noisegate.models import frozen_names
from noisegate.vectors import Loss

BY_NAME = frozenset({"noisegate", "torch", "numpy", "scipy", "sklearn", *sys.stdlib_module_names})
"""The packages whose code is known by its name."""

FORMER_NAMES = {
    "noisegate.aggregators.fortified.rule.Fortified": "noisegate.aggregators.fortified.Fortified",
    "noisegate.aggregators.sign_baselines.SignGaussianSum": "noisegate.aggregators.sign_rules.SignGaussian",
    "noisegate.aggregators.sign_baselines.SignRandomizedSum": "noisegate.aggregators.sign_rules.SignRandomized",
    "noisegate.aggregators.sign_baselines.MaSignVote": "noisegate.aggregators.sign_rules.MaSign",
}
"""The former names of classes that were renamed. Streams keep them: a new name would give new noise."""

FORMER_FIELDS = {
    "noisegate.aggregators.nnm.NearestNeighborMixing": {"aggregator": "rule"},
    "noisegate.aggregators.bucketing.Bucketing": {"aggregator": "rule"},
    "noisegate.aggregators.guerraoui.Guerraoui": {"aggregator": "rule"},
}
"""The former names of settings that were renamed, by class. Streams keep them too."""

PROTOCOL = 4
"""The protocol of `__reduce_ex__`, by which an object says what it is made of. Nothing is pickled."""

OF_TYPING = (
    types.GenericAlias,
    types.UnionType,
    type(ClassVar[int]),
    type(Union[int, str]),  # noqa: UP007
    type(Any),
    type(Literal[1]),
)
"""The types of annotations. Their digest is over their `repr`."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
"""The types of values whose digest is over type and `repr`."""


def digest_of(*parts: Any) -> str:
    """A digest of any values: equal for equal parts, and random where a part has no digest."""
    found = hashlib.blake2b(digest_size=16)
    try:
        for part in parts:
            for piece in _pieces(part, {}):
                found.update(len(piece).to_bytes(8, "big"))
                found.update(piece)
    except RecursionError:  # nested too deeply
        found.update(os.urandom(16))
    return found.hexdigest()


def digest_run(
    examples: tuple[str, ...], module: nn.Module, loss: Loss, parts: tuple[Any, ...], label: str | None = None
) -> str:
    """The digest of all that uploads are made of, except the spec.

    examples: `digest_data` of the workers' and of the server's data. parts: attack, aggregator and worker.
    label: takes the place of the code of module, loss and parts.
    """
    code = label if label is not None else (module, loss, parts)
    frozen = frozen_names(module)
    return digest_of(examples, list(module.state_dict().items()), code, *([frozen] if frozen else []))


def digest_data(data: Dataset) -> str:
    """The digest of the examples of a data set that a run can train on, and of who holds them where it says so."""
    return digest_of(data.x, data.y) if data.owner is None else digest_of(data.x, data.y, data.owner)


def _pieces(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """The bytes that the digest of `value` is over, piece by piece. seen: the values that came before, by id."""
    kind = type(value)
    if kind in PLAIN:
        yield f"{kind.__name__} {value!r}".encode("utf-8", "surrogatepass")
        return
    if _by_name(value):
        yield f"name {_name(value)}".encode()
        return
    if id(value) in seen:
        yield f"again {list(seen).index(id(value))}".encode()
        return
    seen[id(value)] = value
    if kind in (Tensor, nn.Parameter, np.ndarray):
        yield from _numbers(value)
    elif kind is dict:
        yield f"table {len(value)}".encode()
        for key, entry in value.items():
            yield from _pieces(key, seen)
            yield from _pieces(entry, seen)
    elif kind in (list, tuple):
        yield f"row {kind.__name__} {len(value)}".encode()
        for entry in value:
            yield from _pieces(entry, seen)
    elif kind in (set, frozenset):
        yield f"set {kind.__name__} {len(value)}".encode()
        yield from sorted(digest_of(entry).encode() for entry in value)
    else:
        yield from _code(value, seen)


def _code(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """The same for modules, functions, classes and objects."""
    if isinstance(value, types.ModuleType):
        yield f"module {value.__name__}".encode()  # a function that uses it adds what it uses
    elif isinstance(value, types.CodeType):
        yield b"code" + value.co_code
        told = (value.co_consts, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        yield from _pieces(told, seen)
    elif isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        yield f"function {_name(value)}".encode()
        given = value.__defaults__, value.__kwdefaults__, value.__dict__
        yield from _pieces((value.__code__, given, cells, _used(value)), seen)
    elif isinstance(value, types.BuiltinFunctionType | types.MethodType):
        yield f"bound {value.__name__}".encode()
        yield from _pieces((value.__self__, getattr(value, "__func__", None)), seen)
    elif isinstance(value, functools.partial):
        yield b"partial"
        yield from _pieces((value.func, value.args, value.keywords, value.__dict__), seen)
    elif isinstance(value, types.MappingProxyType):
        yield b"proxy"
        yield from _pieces(dict(value), seen)
    elif isinstance(value, staticmethod | classmethod):
        yield b"wrapped"
        yield from _pieces(value.__func__, seen)
    elif isinstance(value, property):
        yield b"property"
        yield from _pieces((value.fget, value.fset, value.fdel), seen)
    elif isinstance(value, type):
        own = {name: entry for name, entry in vars(value).items() if name not in OF_EVERY_CLASS}
        yield f"class {_name(value)}".encode()
        yield from _pieces((type(value), value.__bases__, own), seen)
    elif isinstance(value, Enum):
        yield f"member {value.name}".encode()
        yield from _pieces((type(value), value.value), seen)
    elif isinstance(value, (torch.dtype, torch.device, np.dtype, range, slice, *OF_TYPING)):
        yield f"{type(value).__name__} {value!r}".encode()
    elif (parts := _reduced(value)) is not None:
        yield b"object"
        yield from _pieces((type(value), _with_former_fields(type(value), parts)), seen)
    else:
        yield os.urandom(16)


def _with_former_fields(kind: type, parts: Any) -> Any:
    """The parts of an object with the fields named as streams know them."""
    former = FORMER_FIELDS.get(_name(kind))
    if former is None:
        return parts
    return [
        {former.get(key, key): entry for key, entry in part.items()} if isinstance(part, dict) else part
        for part in parts
    ]


def _used(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function names. Of modules that are no library's, also the attributes that it may use."""
    names, known = _names(function.__code__), function.__globals__
    found: list[tuple[str, Any]] = []
    for name in names:
        value = known.get(name, sys.modules.get(name))  # imported inside
        if name in known or isinstance(value, types.ModuleType):
            found.append((name, value))
            if isinstance(value, types.ModuleType) and not _of_library(value.__name__):
                found += [(f"{name}.{part}", vars(value)[part]) for part in names if part in vars(value)]
    return found


def _numbers(value: Tensor | np.ndarray) -> Iterator[bytes]:
    yield f"numbers {value.dtype} {tuple(value.shape)}".encode()
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            yield os.urandom(16)
            return
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        yield os.urandom(16)
        return
    yield np.ascontiguousarray(value).tobytes()


def _by_name(value: Any) -> bool:
    """Whether a library has this very value under its name. A closure that wraps it may only claim the name."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
        return False
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    if not isinstance(module, str) or not _of_library(module):
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is value


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in BY_NAME


def _name(value: Any) -> str:
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    return FORMER_NAMES.get(name, name)


def _names(code: types.CodeType) -> list[str]:
    """All names that a function, or one defined inside it, looks up."""
    inner = [name for entry in code.co_consts if isinstance(entry, types.CodeType) for name in _names(entry)]
    return sorted({*code.co_names, *inner})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "__annotations__"}
)
"""The attributes of a class that do not change what it does, or that differ from process to process."""


def _reduced(value: Any) -> Any:
    """What pickle would keep of an object: class and attributes, or what it says itself; None if it refuses."""
    own = copyreg.dispatch_table.get(type(value))
    try:
        found = own(value) if own else value.__reduce_ex__(PROTOCOL)
    except Exception:  # noqa: BLE001  # any code may run here
        # A module with parametrizations refuses, and its attributes are all there is to it.
        return vars(value) if isinstance(value, nn.Module) else None
    return found if isinstance(found, str) else [list(part) if isinstance(part, Iterator) else part for part in found]
