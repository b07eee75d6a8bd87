"""The module and the loss of a run: those that are given, or those that its spec names, of the catalog or its own.

A spec names code of its own as `package.module:build` or `file.py:build`. Nothing of it runs before a run begins.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from noisegate import checks, data
from noisegate.catalog import calling, is_own, load
from noisegate.data import Dataset
from noisegate.errors import SpecError
from noisegate.features import Features
from noisegate.features.checking import apply
from noisegate.models import build_model, check_module
from noisegate.runs.features import features_of
from noisegate.runs.spec import Spec
from noisegate.streams import for_a_while, stream
from noisegate.vectors import Loss, cross_entropy


def model_of(spec: Spec, dataset: Dataset, module: nn.Module | None, usual: str, own: bool) -> tuple[str, nn.Module]:
    """The model's name and module. usual: that of the data set. own: the features are not those of the spec."""
    module = spec.given().get("model") if module is None else module
    if module is not None:
        check_module(module)
        return type(module).__name__, module
    if own and spec.model is None:  # the rate was chosen with the spec, and not for these features
        raise SpecError('features: are given, and no model; give one too, such as Spec(model="linear")')
    name = spec.head(usual) or usual
    if is_own(name):
        return name, build_own(name, dataset.shape, dataset.classes, spec.seed)
    return name, build_model(name, dataset.shape, dataset.classes, stream(spec.seed, "weights"))


def build_own(path: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module that a user's own code makes: a class or a function of (shape, classes) or of nothing, or a module.

    shape: of one example. While it is made, torch's global generator is where the seed's weights begin, so that equal
    runs begin with equal weights; it is put back afterwards.
    """
    found = load("model", path)
    if isinstance(found, nn.Module):
        return checked(path, copy.deepcopy(found))
    if not callable(found):
        raise checks.refuse("model", path, "is neither a function that makes a module, nor a module")
    given = arguments(path, found, (shape, classes))
    with calling("model", path, "cannot be made"), for_a_while(stream(seed, "weights")):
        module = found(*given)
    if not isinstance(module, nn.Module):
        raise checks.refuse("model", path, f"must make a torch.nn.Module, not {type(module).__name__}")
    return checked(path, module)


def arguments(path: str, builder: Callable[..., Any], usual: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a builder is called with: all of `usual`, or nothing."""
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError):
        return usual
    for given in (usual, ()):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return given
    raise checks.refuse("model", path, f"cannot be called: it takes {signature}, but must take (shape, classes) or ()")


def checked(path: str, module: nn.Module) -> nn.Module:
    """The module, if it can be trained. The error names where it is from."""
    try:
        check_module(module)
    except SpecError as error:
        raise SpecError(f"model = {checks.shown(path)}: {str(error).removeprefix('model ')}") from None
    return module


def loss_of(spec: Spec, given: Loss) -> Loss:
    """The loss that is given, or that the spec names. A class is made without arguments."""
    if spec.loss is None:
        return given
    if given is not cross_entropy:
        raise SpecError(f"loss = {spec.loss!r}: another is given beside the spec; leave one of them out")
    found = load("loss", spec.loss)
    if isinstance(found, type):
        with calling("loss", spec.loss, "cannot be made"):
            found = found()
    if not callable(found):
        raise checks.refuse("loss", spec.loss, "is neither a function nor a class")
    own: Loss = found
    return own


@dataclass(frozen=True)
class OwnCode:
    """What a spec names by its path: the loaded code, and the module as it is when training begins."""

    code: tuple[Any, ...]
    module: nn.Module | None


def own_code(spec: Spec, dataset: Dataset | None, features: Features | None) -> OwnCode:
    """What a spec names by its path, for a fingerprint. The data are read where a model needs them."""
    path = spec.model if isinstance(spec.model, str) and is_own(spec.model) else None
    code = tuple(load(what, each) for what, each in {"model": path, "loss": spec.loss}.items() if each is not None)
    if path is None:
        return OwnCode(code, None)
    dataset = dataset or data.load(spec.dataset, stream(spec.seed, "test-split"), spec.columns)
    embedding = features_of(spec, features, None)
    shape = dataset.shape if embedding is None else tuple(apply(embedding.make, dataset.x[:2]).shape[1:])
    return OwnCode(code, build_own(path, shape, dataset.classes, spec.seed))
