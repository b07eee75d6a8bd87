"""Which layers own a model's trained parameters, and why some of them have no closed form."""

from torch import nn

from noisegate.vectors import FlatModel
from noisegate.workers.layers import Layer, supported

FAST = "Linear, Conv2d (one group, zeros as padding, given as numbers), GroupNorm, LayerNorm and Embedding"
"""The layers with a closed form, for people."""

CALLED = (
    "its layers are not each called once, with the examples first: one is called twice, not at all or by keyword, or "
    "only its weight is used"
)


def owners(model: FlatModel) -> tuple[list[Layer], str]:
    """The layers in the order of the model, and what stands against a closed form; empty if nothing does."""
    start, places = 0, {}
    for name, size in zip(model.names, model.sizes, strict=True):
        places[name] = slice(start, start + size)
        start += size
    found, covered = [], 0
    for prefix, module in model.module.named_modules():
        mine = [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]
        own = {name: f"{prefix}.{name}" if prefix else name for name in mine}
        if not own:
            continue
        what = f"layer {prefix!r} ({_told(module)})" if prefix else f"the model itself ({_told(module)})"
        # A shared parameter is listed once: the second owner has a name without a place.
        if shared := [name for name in own.values() if name not in places]:
            return [], f"parameter {shared[0]!r} is shared by two layers"
        if not supported(module) or own.keys() - {"weight", "bias"}:
            return [], f"{what} has none"
        if "weight" not in own:
            return [], f"of {what} the bias is trained and the weight is frozen"
        bias = places[own["bias"]] if "bias" in own else None
        found.append(Layer(module, places[own["weight"]], bias))
        covered += len(own)
    return found, "" if found and covered == len(places) else "a parameter belongs to no layer"


def _told(module: nn.Module) -> str:
    """The kind of a layer, with what may stand against a closed form."""
    if type(module) is nn.Conv2d:
        return f"Conv2d, groups {module.groups}, padding {module.padding!r} with {module.padding_mode}"
    return type(module).__name__


def why_untraceable(module: nn.Module) -> str:
    """Why layers that have closed forms could not be watched at work."""
    for path, layer in module.named_modules():
        if getattr(layer, "inplace", False):
            return f"layer {path!r} ({type(layer).__name__}) writes over its inputs (give it inplace=False)"
    return CALLED
