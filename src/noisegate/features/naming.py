"""Names of features become functions here: those of the catalog, a user's own file, or a frozen module."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from noisegate import checks
from noisegate.catalog import build, find, is_own, made, settle
from noisegate.errors import SpecError
from noisegate.features.scattering import Scattering
from noisegate.features.texture import Texture
from noisegate.settings import storable

Features = Callable[[Tensor], Tensor]
"""(B, ...) examples to (B, ...) features, each of its own example alone."""

FEATURES: dict[str, Callable[..., Any]] = {"scattering": Scattering, "texture": Texture}

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_request(request: Any) -> dict[str, Any]:
    """The request for features as a table with `name` and settings. No code of a user's own is loaded for that."""
    if isinstance(request, Mapping) and is_own(request.get("name")):
        settings = {key: value for key, value in request.items() if value is not None}  # which is the default
        if odd := [key for key, value in settings.items() if not storable({key: value})]:
            rule = "must be text, a finite number, true or false, or a list or table of these"
            raise checks.refuse(f"features.{odd[0]}", settings[odd[0]], rule)
        return settings
    if is_own(request):
        return {"name": request}
    return settle("features", request, FEATURES)


def build_features(request: str | Mapping[str, Any]) -> Features:
    """The features that a request asks for: a name, or `package.module:name`, or `file.py:name`.

    A class is made with the settings; a function or a module is taken as it is.
    """
    settings = check_request(request)
    name = settings["name"]
    found = find("features", name, FEATURES)
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
