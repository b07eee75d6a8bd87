"""The module that a run trains: the one that is given, or the one that its spec names."""

from torch import nn

from noisegate.data import Dataset
from noisegate.errors import SpecError
from noisegate.models import build_model, check_module
from noisegate.runs.spec import Spec
from noisegate.streams import stream


def model_of(spec: Spec, dataset: Dataset, module: nn.Module | None, usual: str, own: bool) -> tuple[str, nn.Module]:
    """The model's name and module. usual: that of the data set. own: the features are not those of the spec."""
    if module is not None:
        check_module(module)
        return type(module).__name__, module
    if own and spec.model is None:  # the rate was chosen with the spec, and not for these features
        raise SpecError('features: are given, and no model; give one too, such as Spec(model="linear")')
    name = spec.head(usual) or usual
    return name, build_model(name, dataset.shape, dataset.classes, stream(spec.seed, "weights"))
