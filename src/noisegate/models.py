"""The paper's networks, their initial weights, and what a module must be for the guarantees to hold."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noisegate import checks
from noisegate.errors import SpecError

Builder = Callable[[tuple[int, ...], int], nn.Module]

CHANNELS, GROUPS, HIDDEN = 16, 4, 32
POOLED = 4  # the cnn's feature maps are averaged to 4 x 4
RESIDUAL_BLOCKS = 7


def mlp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Linear, ELU, Linear on examples of any shape: the paper's network for Fashion and USPS (d = 25,450)."""
    _check_shape("mlp", input_shape, classes)
    with torch.device("meta"):
        layers = nn.Sequential(nn.Flatten(), *_head(math.prod(input_shape), classes))
    return _zeroed(layers)


def linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One Linear layer from zeros, on examples of any shape: what features are trained with."""
    _check_shape("linear", input_shape, classes)
    with torch.device("meta"):
        layers = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
    return _zeroed(layers)


def cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three 5 x 5 convolutions on images of at least 16 x 16: the paper's network for MNIST (d = 21,802)."""
    channels, height, width = _image("cnn", input_shape, classes, smallest=16)
    rows, columns = height - 3 * 4, width - 3 * 4  # each unpadded 5 x 5 takes 4
    pool: nn.Module
    if rows % POOLED == 0 and columns % POOLED == 0:
        # The same average, but its gradient on CUDA is deterministic, which that of AdaptiveAvgPool2d is not.
        pool = nn.AvgPool2d((rows // POOLED, columns // POOLED))
    else:
        pool = nn.AdaptiveAvgPool2d((POOLED, POOLED))
    with torch.device("meta"):
        layers = nn.Sequential(
            *_conv(channels, kernel=5),
            *_conv(CHANNELS, kernel=5),
            *_conv(CHANNELS, kernel=5),
            pool,
            nn.Flatten(),
            *_head(CHANNELS * POOLED**2, classes),
        )
    return _zeroed(layers)


def residual(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Seven residual blocks on images of at least 8 x 8: the paper's network for Colorectal (d = 33,736)."""
    channels, _, _ = _image("residual", input_shape, classes, smallest=RESIDUAL_BLOCKS + 1)
    with torch.device("meta"):
        layers = nn.Sequential(
            *_conv(channels, kernel=3, padding=1),
            *(ResidualBlock() for _ in range(RESIDUAL_BLOCKS)),
            nn.AdaptiveAvgPool2d(1),  # to one value torch takes a plain mean: deterministic on CUDA too
            nn.Flatten(),
            *_head(CHANNELS, classes),
        )
    return _zeroed(layers)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions added to their input, then a 2 x 2 maximum at stride 1."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (_conv(CHANNELS, kernel=3, padding=1) for _ in range(2))
        self.body = nn.Sequential(*first, *second)
        self.pool = nn.MaxPool2d(kernel_size=2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 16, h, w) to (N, 16, h - 1, w - 1)."""
        pooled: Tensor = self.pool(x + self.body(x))
        return pooled


MODELS: dict[str, Builder] = {"mlp": mlp, "cnn": cnn, "residual": residual, "linear": linear}

FROM_ZEROS = frozenset({"linear"})
"""The models whose first weights are zeros. Its loss is convex, so it needs no random ones."""

USUAL: dict[str, dict[str, Any]] = {"linear": {"rate": 0.5, "worker": "clipped"}}
"""The settings of a run that a model goes with, where the user gives none."""


def build_model(name: str, input_shape: tuple[int, ...], classes: int, rng: torch.Generator) -> nn.Module:
    """The model `name` of MODELS with weights from `rng`, or zeros (FROM_ZEROS); the global generator is not moved."""
    checks.one_of(MODELS, model=name)
    module = MODELS[name](input_shape, classes)
    if name not in FROM_ZEROS:
        initialize(module, rng)
    check_module(module)
    return module


def initialize(module: nn.Module, rng: torch.Generator) -> None:
    """Set every parameter, from `rng` alone, in the order of `module.modules()`.

    Linear weights are Xavier normal, Conv2d weights N(0, 2 / (k^2 c_out)), their biases zero; normalization
    layers start as the identity. A layer of another kind that has parameters is refused, rather than left as
    it was.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, generator=rng)
        elif isinstance(layer, nn.Conv2d):
            height, width = layer.kernel_size
            std = math.sqrt(2 / (height * width * layer.out_channels))
            nn.init.normal_(layer.weight, 0.0, std, generator=rng)
        elif isinstance(layer, nn.GroupNorm | nn.LayerNorm):
            layer.reset_parameters()  # ones and zeros: draws nothing
            continue
        elif next(layer.parameters(recurse=False), None) is not None:
            raise SpecError(
                f"model has a layer {type(layer).__name__}, for which no initial weights are defined; "
                "use Linear, Conv2d, GroupNorm and LayerNorm, or set its weights yourself"
            )
        else:
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _check_shape(name: str, input_shape: tuple[int, ...], classes: int) -> None:
    checks.count(classes=classes)
    if not input_shape or min(input_shape) < 1:
        raise SpecError(
            f"model {name!r} cannot take examples of shape {tuple(input_shape)}: it needs at least one value"
        )


def _image(name: str, input_shape: tuple[int, ...], classes: int, smallest: int) -> tuple[int, int, int]:
    _check_shape(name, input_shape, classes)
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise SpecError(
            f"model {name!r} cannot take examples of shape {tuple(input_shape)}: it needs (channels, height, "
            f"width) with height and width at least {smallest}; choose model 'mlp', or reshape the data"
        )
    channels, height, width = input_shape
    return channels, height, width


def _conv(channels: int, kernel: int, padding: int = 0) -> tuple[nn.Module, ...]:
    # Group statistics are of one example alone, and without affine parameters they add nothing to d.
    norm = nn.GroupNorm(GROUPS, CHANNELS, affine=False)
    return nn.Conv2d(channels, CHANNELS, kernel, padding=padding), nn.ELU(), norm


def _head(features: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.Linear(features, HIDDEN), nn.ELU(), nn.Linear(HIDDEN, classes)


def _zeroed(module: nn.Module) -> nn.Module:
    """Give memory to what was built on the meta device, since torch's own initialization is a global draw."""
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def check_module(module: nn.Module) -> None:
    """Refuse a module under which a stated guarantee would not hold: says which layer and what to use.

    An accepted module has parameters to train, all of them float32, and none of torch's layers that mix the examples of
    a batch or draw random numbers of their own. In a frozen part (all parameters have requires_grad=False) these may
    be: modules run in evaluation mode, where a BatchNorm takes the statistics that it holds, and changes none, and a
    Dropout does nothing. Layers written by others cannot be seen through.
    """
    frozen = frozen_parts(module)
    for path, layer in module.named_modules():
        if _in_a(frozen, path) and _harmless_when_frozen(layer):
            continue
        _check_layer(f"layer {path!r} ({type(layer).__name__})" if path else type(layer).__name__, layer)
    named = list(module.named_parameters())
    if not named:
        raise SpecError("model has no parameters: there is nothing to train")
    for name, parameter in named:
        if nn.parameter.is_lazy(parameter):
            raise SpecError(f"model parameter {name!r} has no shape yet; pass one batch through it first")
        if parameter.dtype != torch.float32:
            raise SpecError(f"model parameter {name!r} is {parameter.dtype}; it must be float32, as the data are")
    if not any(parameter.requires_grad for _, parameter in named):
        raise SpecError(
            f"model has {len(named)} parameters, all of them frozen (requires_grad=False): there is nothing to train; "
            "leave those of the last layer trainable"
        )


def frozen_names(module: nn.Module) -> list[str]:
    """The names of the parameters that are not trained."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def frozen_parts(module: nn.Module) -> set[str]:
    """The paths of the modules that have parameters, none of which is trained."""
    return {
        path
        for path, part in module.named_modules()
        if (own := list(part.parameters())) and not any(each.requires_grad for each in own)
    }


def _in_a(parts: set[str], path: str) -> bool:
    """Whether a path is of one of these parts, or of something inside one."""
    steps = path.split(".")
    return any(".".join(steps[: i + 1]) in parts for i in range(len(steps)))


def _harmless_when_frozen(layer: nn.Module) -> bool:
    """Whether a layer treats each example alone in evaluation mode, and draws nothing there."""
    if isinstance(layer, (*_BATCH_NORMS, *_INSTANCE_NORMS)):
        return layer.running_mean is not None or isinstance(layer, _INSTANCE_NORMS)
    return not isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def _check_layer(what: str, layer: nn.Module) -> None:
    running = isinstance(layer, _INSTANCE_NORMS) and layer.track_running_stats
    if running or isinstance(layer, _BATCH_NORMS):
        raise SpecError(
            f"model {what} mixes examples, so one example's gradient depends on the others and the "
            "sensitivity bound does not hold; use GroupNorm, or freeze the part that it is in (requires_grad=False)"
        )
    drops = isinstance(layer, _DROPOUTS) and layer.p > 0
    inner = isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0
    if drops or inner or isinstance(layer, _RANDOM):
        raise SpecError(
            f"model {what} draws from torch's global generator, so a run could not be repeated; remove it "
            "(the privacy noise already regularizes)"
        )
