import math

import pytest
import torch
from torch import nn

from noisegate.errors import SpecError
from noisegate.models import FROM_ZEROS, MODELS, build_model, check_module, initialize
from noisegate.streams import stream

SHAPES = {"mlp": ((1, 28, 28), 10), "cnn": ((1, 28, 28), 10), "residual": ((3, 64, 64), 8), "linear": ((81, 7, 7), 10)}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# The paper, appendix "Model setup": d of MNIST, Fashion and USPS, Colorectal. `linear` is for features.
@pytest.mark.parametrize(("name", "d"), [("cnn", 21_802), ("mlp", 25_450), ("residual", 33_736), ("linear", 39_700)])
def test_sizes_are_the_papers(name, d):
    shape, classes = SHAPES[name]
    model = build_model(name, shape, classes, stream(1, "model"))
    assert size(model) == d
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", MODELS)
def test_building_leaves_the_global_generator_alone_and_follows_its_own(name):
    shape, classes = SHAPES[name]
    before = torch.get_rng_state()
    first, again, other = (build_model(name, shape, classes, stream(seed, "model")) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    flat = [nn.utils.parameters_to_vector(model.parameters()) for model in (first, again, other)]
    assert torch.equal(flat[0], flat[1])
    assert torch.equal(flat[0], flat[2]) == (name in FROM_ZEROS)


@pytest.mark.parametrize("name", MODELS)
def test_builders_give_zero_weights_until_initialized(name):
    model = MODELS[name](*SHAPES[name])
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_treated_alike_alone_and_in_a_batch(name):
    shape, classes = SHAPES[name]
    model = build_model(name, shape, classes, stream(1, "model"))
    x = torch.randn(3, *shape, generator=stream(1, "x"))
    with torch.no_grad():
        alone = torch.cat([model(one[None]) for one in x])
        torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)


def test_initial_weights_have_the_stated_laws():
    linear, conv = nn.Linear(200, 300), nn.Conv2d(16, 64, 5)
    initialize(nn.Sequential(linear, conv, nn.GroupNorm(4, 64)), stream(1, "model"))
    # 60,000 and 25,600 draws: the sample std is within 2% of its law with overwhelming probability.
    assert linear.weight.std().item() == pytest.approx(math.sqrt(2 / 500), rel=0.02)
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (25 * 64)), rel=0.02)
    assert not linear.bias.any()
    assert not conv.bias.any()


def test_a_layer_without_defined_initial_weights_is_refused():
    with pytest.raises(SpecError, match="Embedding"):
        initialize(nn.Embedding(3, 4), stream(1, "model"))


def test_the_cnn_averages_to_four_by_four_as_printed():
    pools = [layer for layer in MODELS["cnn"]((1, 28, 28), 10).modules() if isinstance(layer, nn.AvgPool2d)]
    x = torch.randn(2, 16, 16, 16, generator=stream(1, "x"))
    torch.testing.assert_close(pools[0](x), nn.AdaptiveAvgPool2d((4, 4))(x))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 33, 47)])
def test_the_cnn_takes_other_sizes(shape):
    assert build_model("cnn", shape, 5, stream(1, "model"))(torch.zeros(2, *shape)).shape == (2, 5)


def test_the_residual_network_takes_its_smallest_size():
    assert build_model("residual", (1, 8, 8), 3, stream(1, "model"))(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cnn", (28, 28)),
        ("cnn", (1, 15, 28)),
        ("residual", (3, 7, 64)),
        ("residual", (64,)),
        ("mlp", ()),
        ("mlp", (0,)),
    ],
)
def test_a_shape_that_does_not_fit_is_one_sentence(name, shape):
    with pytest.raises(SpecError, match=f"model '{name}' cannot take examples of shape"):
        build_model(name, shape, 10, stream(1, "model"))


def test_an_unknown_model_names_the_choices():
    with pytest.raises(SpecError, match=r"did you mean 'cnn'\?\); choose from mlp, cnn, residual"):
        build_model("cnnn", (1, 28, 28), 10, stream(1, "model"))


def test_classes_must_be_a_count():
    with pytest.raises(SpecError, match="classes = 0"):
        build_model("mlp", (4,), 0, stream(1, "model"))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
)
def test_layers_that_mix_examples_are_refused(layer):
    with pytest.raises(SpecError, match=r"layer '1' \(\w+\) mixes examples.*use GroupNorm"):
        check_module(nn.Sequential(nn.Linear(4, 4), layer))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.1),
        nn.AlphaDropout(0.5),
        nn.RReLU(),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
    ],
)
def test_layers_that_draw_are_refused(layer):
    with pytest.raises(SpecError, match="global generator"):
        check_module(nn.Sequential(nn.Linear(4, 4), layer))


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)])
def test_harmless_layers_are_accepted(layer):
    check_module(nn.Sequential(nn.Linear(4, 4), layer))


def test_parameters_must_be_there_real_and_trained():
    with pytest.raises(SpecError, match="nothing to train"):
        check_module(nn.Flatten())
    with pytest.raises(SpecError, match=r"'weight' is torch.complex64"):
        check_module(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(SpecError, match=r"2 parameters, all of them frozen .*nothing to train"):
        check_module(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(SpecError, match="no shape yet"):
        check_module(nn.LazyLinear(2))
