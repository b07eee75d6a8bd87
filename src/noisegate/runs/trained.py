"""The model that a run trained: of a run that just ended, or of a folder, from which it is made when it is asked for.

Of a folder the tensors alone are read, which runs no code. The module is the one of the catalog, or the one that the
spec names by its path, whose code runs then, or the one that is given.
"""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from noisegate.catalog import is_own
from noisegate.checks import plain
from noisegate.data.arrays import array_of, features_of
from noisegate.errors import DataError, SpecError, StoreError
from noisegate.features import Features, build_features, embed, freeze
from noisegate.models import MODELS, build_model, check_module
from noisegate.runs.modules import build_own
from noisegate.runs.store import MODEL, RunFolder
from noisegate.simulate.train import EVALUATION_BLOCK
from noisegate.streams import stream
from noisegate.vectors import FlatModel


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model and the vector of its parameters. features: what examples are turned into first."""

    model: FlatModel
    params: Tensor
    features: Features | None = None

    def module(self) -> nn.Module:
        """A module of its own, with what was trained, in evaluation mode and on the CPU."""
        module = copy.deepcopy(self.model.module).cpu().eval()
        with torch.no_grad():
            for name, value in self.model.tensors(self.params).items():
                module.get_parameter(name).copy_(value)
                module.get_parameter(name).requires_grad_(True)
        return module

    @torch.no_grad()
    def predict(self, x: Any, shape: tuple[int, ...] | None, columns: tuple[str, ...] = ()) -> Tensor:
        """(N,) the class of each example, the one with the highest score. shape: of what the model takes of one.

        columns: of a frame, those that the model was trained on, whatever their order; unless given all, as they stand.
        """
        examples = features_of("predict", "x", array_of("predict", "x", x, columns))
        if self.features is not None:
            examples = embed(self.features, examples)
        if shape is not None and tuple(examples.shape[1:]) != shape:
            wanted = f"(N, {', '.join(map(str, shape))}): N examples, one after the other"
            raise DataError(f"predict: x is of shape {tuple(examples.shape)}, but the model takes {wanted}")
        model = FlatModel(self.model.module, self.model.loss, "cpu", self.model.classes)
        blocks = examples.split(EVALUATION_BLOCK)
        return torch.cat([model.scores(self.params, block).argmax(1) for block in blocks])


@dataclass(frozen=True, eq=False)
class StoredModel:
    """The model in a run folder, read when it is asked for. module, features: your own, if the run had them."""

    folder: Path
    module: nn.Module | None = None
    features: Features | None = None

    def read(self, result: Any) -> TrainedModel:
        """The model of the run with this result. StoreError or SpecError if it cannot be made again."""
        model = FlatModel(self._module(result), classes=result.classes)
        tensors = self._tensors()
        wanted = dict(zip(model.names, model.shapes, strict=True))
        kept = {name: tuple(value.shape) for name, value in model.kept().items()}
        found = {name: tuple(value.shape) for name, value in tensors.items()}
        # Earlier versions wrote what was trained, without buffers; frozen parameters they did not have.
        if found not in (wanted, {**wanted, **kept}):
            raise SpecError(
                f"{plain(self.folder)}: what was trained does not fit the module, whose parameters have other names or "
                "shapes; give the module that was trained"
            )
        model.module.load_state_dict({name: tensors[name] for name in kept.keys() & tensors.keys()}, strict=False)
        params = torch.cat([tensors[name].flatten().to(torch.float32) for name in model.names])
        return TrainedModel(model, params, self._features(result))

    def _module(self, result: Any) -> nn.Module:
        if self.module is not None:
            check_module(self.module)
            return self.module
        name, where = result.model_name, plain(self.folder)
        if name not in MODELS and not is_own(name):
            raise SpecError(f"{where}: its model, {name}, was an object; give it: noisegate.load({where!r}, model=net)")
        if result.input_shape is None or result.classes is None:
            raise SpecError(
                f"{where}: an earlier version wrote it, and not what its model takes; give the module: "
                f"noisegate.load({where!r}, model=net)"
            )
        shape, seed = tuple(result.input_shape), result.seed
        if is_own(name):
            return build_own(name, shape, result.classes, seed)
        return build_model(name, shape, result.classes, stream(seed, "weights"))

    def _features(self, result: Any) -> Features | None:
        if self.features is not None:
            return freeze(self.features)
        request = result.spec.get("features")
        if isinstance(request, str | Mapping):
            return build_features(request)
        if result.features:
            where = plain(self.folder)
            raise SpecError(
                f"{where}: its features, {result.features}, were an object; give it: "
                f"noisegate.load({where!r}, features=embed)"
            )
        return None

    def _tensors(self) -> dict[str, Tensor]:
        path = self.folder / MODEL
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{plain(path)}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(content).hexdigest() != RunFolder(self.folder).sums().get(MODEL):
            raise StoreError(f"{plain(path)}: is damaged (its checksum is not that of result.json)")
        try:
            return load_tensors(content)
        except SafetensorError:
            raise StoreError(f"{plain(path)}: is damaged (not tensors)") from None
