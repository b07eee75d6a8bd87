"""Names of features become functions here: those of the catalog, a user's own file, or a frozen module."""

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from noisegate import checks
from noisegate.catalog import build, find, made, settle
from noisegate.errors import SpecError
from noisegate.features.scattering import Scattering
from noisegate.features.texture import Texture

Features = Callable[[Tensor], Tensor]
"""(B, ...) examples to (B, ...) features, each of its own example alone."""

FEATURES: dict[str, Callable[..., Any]] = {"scattering": Scattering, "texture": Texture}

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

OWN = "noisegate_own_"
"""What the module of a user's own file is called, before its name."""


def check_request(request: Any) -> dict[str, Any]:
    """The request for features as a table with `name` and settings. No code of a user's own is loaded for that."""
    if isinstance(request, Mapping) and isinstance(request.get("name"), str) and ":" in request["name"]:
        return dict(request)
    if isinstance(request, str) and ":" in request:
        return {"name": request}
    return settle("features", request, FEATURES)


def build_features(request: str | Mapping[str, Any]) -> Features:
    """The features that a request asks for: a name, or `package.module:name`, or `file.py:name`.

    A class is made with the settings; a function or a module is taken as it is.
    """
    settings = check_request(request)
    name = settings["name"]
    found = _of_file(name) if name.rpartition(":")[0].endswith(".py") else find("features", name, FEATURES)
    if isinstance(found, type):
        return freeze(made("features", settings, found))
    if more := [key for key in settings if key != "name"]:
        raise checks.refuse(f"features.{more[0]}", settings[more[0]], f"{checks.shown(name)} takes no settings")
    return freeze(found)


def catalog_features(request: str | Mapping[str, Any], where: str = "") -> Scattering | None:
    """Features by their name in the catalog, for what a stranger may have written: no code is loaded. None for none.

    where: the file, for messages.
    """
    if not request:
        return None
    name = request if isinstance(request, str) else request.get("name")
    if name not in FEATURES:
        what = f"{where}: features" if where else "features"
        raise checks.refuse(what, name, f"must be one of {', '.join(FEATURES)}; a program may bring its own")
    found: Scattering = build("features", request, FEATURES)
    return found


def _of_file(name: str) -> Any:
    """What a user's own file calls so."""
    path, _, attribute = name.rpartition(":")
    try:
        about = Path(path).stat()
    except OSError as error:
        raise checks.refuse("features", name, f"cannot be loaded ({error.strerror})") from None
    module = _load(str(Path(path).resolve()), about.st_mtime_ns, name)
    if not callable(found := getattr(module, attribute, None)):
        raise checks.refuse("features", name, f"the file has no function, class or module {attribute!r}")
    return found


@functools.lru_cache(maxsize=16)
def _load(path: str, changed: int, name: str) -> Any:
    """The module of a file, which is run once. changed: when the file was written."""
    called = OWN + Path(path).stem
    about = importlib.util.spec_from_file_location(called, path)
    if about is None or about.loader is None:
        raise checks.refuse("features", name, "is not a file of Python")
    module = importlib.util.module_from_spec(about)
    sys.modules[called] = module  # which dataclasses and pickle look for
    try:
        about.loader.exec_module(module)
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # anyone's code may raise anything
        kind = type(error).__name__
        raise checks.refuse("features", name, f"cannot be loaded ({kind}: {checks.told(error)})") from None
    return module


def freeze(features: Any) -> Features:
    """A copy that nothing trains: a module in evaluation mode, without gradients. SpecError if it cannot be frozen."""
    if not callable(features) or isinstance(features, type):
        raise SpecError(f"features: must be a function or a module, not {type(features).__name__}")
    for learns in ("fit", "partial_fit"):
        if hasattr(features, learns):
            raise SpecError(
                f"features: {type(features).__name__} has a method {learns!r}, so it is fitted to examples; features "
                "of private examples must be fitted to none of them. Give a function that applies what public data gave"
            )
    if not isinstance(features, nn.Module):
        return features  # type: ignore[no-any-return]
    for path, layer in features.named_modules():
        if isinstance(layer, _BATCH_NORMS) and layer.running_mean is None:
            raise SpecError(
                f"features: layer {path!r} ({type(layer).__name__}) holds no statistics of its own and takes those of "
                "the batch, so it mixes examples; use GroupNorm, or the statistics of the public data"
            )
    for name, parameter in features.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise SpecError(f"features: parameter {name!r} has no shape yet; pass one batch through it first")
    try:
        frozen: Features = copy.deepcopy(features).eval().requires_grad_(False)
    except RuntimeError as error:
        raise SpecError(f"features: cannot be copied ({str(error).splitlines()[0]})") from None
    return frozen
