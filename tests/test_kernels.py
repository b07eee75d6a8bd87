"""Every kernel of a worker's sums and of the noise tests computes what its plain twin computes.

Triton's interpreter runs them here, on a CPU (`make kernels`); tests/test_cuda.py runs them on a device.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from devices import needs_interpreter, on_device
from noisegate import kernels
from noisegate.aggregators import ks_test
from noisegate.capacity import Capacity
from noisegate.examples import Examples
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import Clipped, Normalized
from noisegate.workers.closed_form import ClosedForm

pytestmark = needs_interpreter

SINGLE = 1e-5  # sums of some hundred products in float32, relative to their size
COUNTS = [3, 0, 9, 1]  # examples of each worker
EMPTY = 2  # places behind them


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "kernels"))


def grouped():
    """Examples by worker, with empty places at the end."""
    from noisegate.kernels.outer import ByWorker

    owner = torch.repeat_interleave(torch.arange(len(COUNTS) + 1), torch.tensor([*COUNTS, EMPTY]))
    return ByWorker(owner, torch.searchsorted(owner, torch.arange(len(COUNTS) + 1)), 4)


def spoiled(values: Tensor) -> Tensor:
    """NaN at the empty places, on which no result may depend."""
    values[-EMPTY:] = torch.nan
    return values


# --- lengths and sums of per-example gradients -----------------------------------------------------------------------

LAYERS = [(5, 3, True), (20, 17, False), (1030, 3, True), (4, 260, True), (1, 1, True)]  # inputs, outputs, bias


def a_layer(inputs: int, outputs: int, bias: bool):
    """Inputs, output gradients, where the layer lies in vectors, and all gradients as rows of a vector in float64."""
    from noisegate.kernels.outer import LayerPlace

    examples, size, begin = sum(COUNTS) + EMPTY, outputs * (inputs + bias), 7
    a, delta = spoiled(normal(examples, inputs)), spoiled(normal(examples, outputs, seed=1))
    place = LayerPlace(begin, begin + inputs * outputs if bias else None)
    rows = torch.zeros(examples, begin + size + 2, dtype=torch.float64)
    matrices = delta.double()[:, :, None] * a.double()[:, None, :]
    rows[:, begin : begin + inputs * outputs] = matrices.flatten(1)
    if bias:
        rows[:, place.bias : place.bias + outputs] = delta.double()
    return a, delta, place, rows


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_lengths_of_linear_layers(layer, first):
    from noisegate.kernels import lengths

    a, delta, place, rows = a_layer(*layer)
    by_worker, real = grouped(), slice(0, sum(COUNTS))
    vectors = normal(len(COUNTS), rows.shape[1], seed=2)
    before = torch.full((len(a),), 3.0, dtype=torch.float64)
    for with_inner in (True, False):
        square, found = before.clone(), before.clone()
        inner = lengths.InnerProducts(found, vectors) if with_inner else None
        lengths.linear_lengths(a, delta, by_worker, place, square, inner, first)
        added = 0.0 if first else 3.0
        wanted = rows[real].square().sum(1)
        torch.testing.assert_close(square[real] - added, wanted, rtol=1e-12, atol=1e-12)
        assert (square[-EMPTY:] == (1.0 if first else 3.0)).all()
        if with_inner:
            wanted = (rows[real] * vectors[by_worker.owner[real]]).sum(1)
            off = (found[real] - added - wanted).abs()
            assert (off <= SINGLE * rows[real].norm(dim=1) * vectors[by_worker.owner[real]].norm(dim=1)).all()
            assert (found[-EMPTY:] == (0.0 if first else 3.0)).all()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", [1, 40, 1100])
def test_lengths_of_rows(size, first):
    from noisegate.kernels import lengths

    by_worker, real, begin = grouped(), slice(0, sum(COUNTS)), 3
    rows, vectors = spoiled(normal(sum(COUNTS) + EMPTY, size)), normal(len(COUNTS), begin + size + 1, seed=1)
    for with_inner in (True, False):
        square, found = (torch.full((len(rows),), 3.0, dtype=torch.float64) for _ in range(2))
        inner = lengths.InnerProducts(found, vectors) if with_inner else None
        lengths.row_lengths(rows, by_worker, begin, square, inner, first)
        added = 0.0 if first else 3.0
        torch.testing.assert_close(square[real] - added, rows[real].double().square().sum(1), rtol=1e-12, atol=1e-12)
        assert (square[-EMPTY:] == (1.0 if first else 3.0)).all()
        if with_inner:
            of_owner = vectors[by_worker.owner[real], begin : begin + size].double()
            wanted = (rows[real].double() * of_owner).sum(1)
            torch.testing.assert_close(found[real] - added, wanted, rtol=1e-12, atol=1e-11)


@pytest.mark.filterwarnings("ignore:invalid value encountered in sqrt:RuntimeWarning")  # numpy's, of a negative square
def test_which_lengths_are_trusted():
    from noisegate.kernels.mixing import TrustLimits, mix

    by_worker, limits = grouped(), TrustLimits(cancellation=0.25, low=1e-12, high=1e12, shortest=1e-30)
    square = spoiled(normal(sum(COUNTS) + EMPTY).double().square())
    square[0], square[1], square[2], square[12] = 0.0, torch.nan, 1e26, 1e-80
    last, ratio = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64), 0.1
    inner = spoiled(normal(len(square), seed=1).double() * 0.01)
    inner[5] = -10 * (square[5] + ratio**2 * last[2])  # a square that comes out negative
    inner[12] = 0.0
    length, trusted = mix(square, inner, last, by_worker, ratio, limits)
    owner = by_worker.owner[:-EMPTY]
    of_last = last[owner]
    wanted = (square[:-EMPTY] + 2 * ratio * inner[:-EMPTY] + ratio**2 * of_last).sqrt()
    reach = square[:-EMPTY].sqrt() + ratio * of_last.sqrt()
    silent = reach < limits.shortest
    torch.testing.assert_close(
        length[:-EMPTY], torch.where(silent, torch.inf, wanted), rtol=1e-12, atol=0.0, equal_nan=True
    )
    sound = (wanted >= limits.cancellation * reach) & (wanted >= limits.low) & (reach < limits.high)
    assert torch.equal(trusted[:-EMPTY], sound | silent)
    assert silent.tolist() == [j == 12 for j in range(len(silent))]
    assert not trusted[[1, 2, 5]].any()
    assert trusted[-EMPTY:].all()
    assert (length[-EMPTY:] == 1).all()
    alone, trusted = mix(square, None, None, by_worker, 0.0, limits)
    torch.testing.assert_close(alone[3:-EMPTY], torch.where(silent[3:], torch.inf, square[3:-EMPTY].sqrt()))
    assert alone[0] == torch.inf  # nothing at all: silent, without momentum
    assert trusted.tolist() == [j not in (1, 2) for j in range(len(square))]
    with pytest.raises(ValueError, match="come together"):
        mix(square, inner, None, by_worker, ratio, limits)


def some_weights() -> Tensor:
    weights = normal(sum(COUNTS) + EMPTY, seed=3).abs()
    weights[1] = 0.0
    return weights


def momentum(d: int):
    """Last vectors and totals; one of them is NaN, with a total of zero."""
    from noisegate.kernels.sums import Momentum

    last, totals = normal(len(COUNTS), d, seed=5), torch.tensor([0.5, 0.0, 0.1, 2.0])
    last[1] = torch.nan
    return Momentum(last, totals), totals[:, None] * torch.where(totals[:, None] > 0, last, 0.0)


def wanted_sums(rows: Tensor, weights: Tensor) -> Tensor:
    owner = grouped().owner[:-EMPTY]
    weighted = torch.where(weights[:-EMPTY, None] > 0, weights[:-EMPTY, None] * rows[:-EMPTY], 0.0)
    return torch.zeros(len(COUNTS), rows.shape[1], dtype=rows.dtype).index_add_(0, owner, weighted)


@pytest.mark.parametrize("with_last", [True, False])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_sums_of_linear_layers(layer, with_last):
    from noisegate.kernels import sums

    a, delta, place, rows = a_layer(*layer)
    a[1], delta[1] = torch.nan, torch.nan  # of weight zero
    weights, d = some_weights(), rows.shape[1]
    into, (given, of_last) = torch.ones(len(COUNTS), d), momentum(d)
    sums.linear_add(a, delta, weights, grouped().starts, into, place, given if with_last else None)
    here = torch.zeros(d, dtype=torch.bool)
    here[place.weight : d - 2] = True
    wanted = 1 + wanted_sums(rows, weights.double()) + torch.where(here, of_last if with_last else 0.0, 0.0)
    torch.testing.assert_close(into.double(), wanted, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("with_last", [True, False])
@pytest.mark.parametrize("size", [1, 40, 600])
def test_sums_of_rows(size, with_last):
    from noisegate.kernels import sums

    begin, d, weights = 3, size + 5, some_weights()
    rows, into, (given, of_last) = spoiled(normal(len(weights), size)), torch.ones(len(COUNTS), d), momentum(d)
    rows[1] = torch.nan
    sums.row_add(rows, weights, grouped().starts, into, begin, given if with_last else None)
    wanted = torch.ones(len(COUNTS), d, dtype=torch.float64)
    wanted[:, begin : begin + size] += wanted_sums(rows.double(), weights.double())
    if with_last:
        wanted[:, begin : begin + size] += of_last[:, begin : begin + size]
    torch.testing.assert_close(into.double(), wanted, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_totals_of_weights(dtype):
    from noisegate.kernels import sums

    weights = spoiled(some_weights().to(dtype))
    wanted = 0.1 * wanted_sums(weights[:, None].double(), torch.ones(len(weights), dtype=torch.float64))[:, 0]
    torch.testing.assert_close(sums.totals(weights, grouped().starts, 0.1), wanted.float())


MODELS = {
    "linear": (nn.Linear(6, 3), (6,)),
    "without bias": (nn.Linear(6, 3, bias=False), (6,)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 3)),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("worker", [Normalized(), Normalized(0.0), Clipped(0.5, 0.1)], ids=str)
def test_a_workers_sums_by_kernels_are_those_without(name, worker, monkeypatch):
    """All kernels of a worker in the order of a round: convolutions, gradients, lengths, trust and sums."""
    from noisegate.kernels import convolution, own_convolutions

    (module, shape), by_worker = MODELS[name], grouped()
    model = FlatModel(module)
    params, last = model.initial(), 0.05 * normal(len(COUNTS), model.d, seed=1)
    x, y = normal(len(by_worker.owner), *shape), torch.arange(len(by_worker.owner)) % 3
    sums, wanted = ClosedForm.of(model), torch.zeros_like(last)
    there = Examples(x[:-EMPTY], y[:-EMPTY], by_worker.owner[:-EMPTY])
    sums.add(worker, params, there, last, wanted, 0.5)

    used = []
    for home, kernel in ((convolution, "weight_gradients"), (own_convolutions, "convolve")):
        monkeypatch.setattr(home, kernel, noted(used, kernel, getattr(home, kernel)))
    monkeypatch.setattr(kernels, "available", lambda: True)
    capacity, into = Capacity(len(y), max(COUNTS), 0), on_device(torch.zeros_like(last))
    moved = [on_device(each) for each in (spoiled(x), y, by_worker.owner)]
    sums.add(worker, on_device(params), Examples(*moved, max(COUNTS), capacity), on_device(last), into, 0.5)
    assert bool(capacity.fits())
    assert (into.as_subclass(Tensor) - wanted).norm(dim=1).max() <= SINGLE * len(y)
    assert wanted.any(1).tolist() == [count > 0 for count in COUNTS]
    assert sorted(used) == (2 * ["convolve"] + 2 * ["weight_gradients"] if name == "convolutions" else [])


def noted(used: list[str], name: str, function):
    """The function, which writes its name down whenever it is called."""

    def call(*args, **named):
        used.append(name)
        return function(*args, **named)

    return call


# --- convolutions ----------------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    nn.Conv2d(1, 16, 5),  # steps by columns
    nn.Conv2d(16, 16, 3, padding=1),  # steps by taps; 144 columns, in a tile of 128 + 16
    nn.Conv2d(20, 70, 3, bias=False),  # channels that fill no block, and more outputs than a tile has
    nn.Conv2d(3, 40, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    nn.Conv2d(20, 7, 1, stride=3),
    nn.Conv2d(2, 3, (9, 8), padding=9),  # more padding than the window reaches over
    nn.Conv2d(1, 1, (17, 15), padding=8),  # more rows and columns than there are bits
]


def images_for(conv: nn.Conv2d, count: int = 3) -> tuple[Tensor, Tensor]:
    """Images, and output gradients that belong to them."""
    a = normal(count, conv.in_channels, 11, 9)
    return a, normal(*conv(a).shape, seed=1)


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_gradients_of_convolutions_for_each_example(conv):
    from noisegate.kernels.convolution import weight_gradients

    a, delta = images_for(conv)
    found = weight_gradients(a, delta, conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    twin = copy.deepcopy(conv).double()
    for j in range(len(a)):
        loss = (twin(a[j : j + 1].double()) * delta[j].double()).sum()
        (wanted,) = torch.autograd.grad(loss, [twin.weight])
        assert (found[j].flatten() - wanted.flatten()).norm() <= 2e-6 * wanted.norm()


def test_a_sum_in_pieces_is_the_sum(monkeypatch):
    from noisegate.kernels import convolution

    conv = nn.Conv2d(2, 3, 3)
    a, delta = images_for(conv)
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    monkeypatch.setattr(convolution, "FILL_WARPS", 1)
    whole = convolution.weight_gradients(a, delta, *shape)
    monkeypatch.setattr(convolution, "FILL_WARPS", 2048)
    monkeypatch.setattr(convolution, "LEAST_STEPS", 1)
    assert convolution.pieces_of(3, 2) == (2, 1)
    torch.testing.assert_close(convolution.weight_gradients(a, delta, *shape), whole)
    assert convolution.weight_gradients(a[:0], delta[:0], *shape).shape == (0, 3, 18)


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolutions_are_those_of_torch(conv):
    from noisegate.kernels import images, own_convolutions

    twin = copy.deepcopy(conv).double()
    a, delta = images_for(conv)
    exact = a.double().requires_grad_()
    wanted = twin(exact)
    (wanted_a,) = torch.autograd.grad(wanted, exact, delta.double())
    bias = None if conv.bias is None else conv.bias.detach()
    window = own_convolutions.Window(conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    found = images.convolve(a, conv.weight.detach(), bias, window)
    found_a = images.input_gradient(delta, conv.weight.detach(), a.shape, window)
    assert (found - wanted).norm() <= 2e-6 * wanted.norm()
    assert (found_a - wanted_a).norm() <= 2e-6 * wanted_a.norm()
    assert images.convolve(a[:0], conv.weight.detach(), bias, window).shape == (0, *wanted.shape[1:])


def test_what_is_in_an_image_stays_there():
    from noisegate.kernels import images
    from noisegate.kernels.windows import Window

    conv = nn.Conv2d(1, 4, 3).requires_grad_(False)
    a, _ = images_for(conv)
    wanted, window = conv(a), Window((3, 3), (1, 1), (0, 0), (1, 1))
    a[1] = torch.nan
    found = images.convolve(a, conv.weight, conv.bias, window)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]])


def test_torchs_convolutions_go_through_ours(monkeypatch):
    from noisegate.kernels import own_convolutions

    conv = nn.Conv2d(3, 8, 3, padding=1)
    a, delta = images_for(conv)
    plain = a.clone().requires_grad_()
    wanted = conv(plain)
    (wanted_a,) = torch.autograd.grad(wanted, plain, delta)
    weight, bias = on_device(conv.weight.detach()), on_device(conv.bias.detach())
    calls = []
    monkeypatch.setattr(own_convolutions, "convolve", noted(calls, "convolve", own_convolutions.convolve))
    own = on_device(a).requires_grad_()
    with own_convolutions.OwnConvolutions():
        found = torch.nn.functional.conv2d(own, weight, bias, padding=1)
        torch.nn.functional.conv2d(own, weight, bias, padding="same")  # left to torch
        torch.nn.functional.conv2d(a, conv.weight, conv.bias)  # not on a device
        torch.nn.functional.conv2d(own, on_device(normal(65, 3, 3, 3)))  # too many channels
    assert len(calls) == 1
    (found_a,) = torch.autograd.grad(found, own, on_device(delta))
    torch.testing.assert_close(found.as_subclass(Tensor), wanted)
    torch.testing.assert_close(found_a.as_subclass(Tensor), wanted_a)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"a": normal(2, 1, 5, 5).double()}, TypeError, "float32"),
        ({"a": normal(2, 2, 5, 5)}, ValueError, "do not belong"),
        ({"a": normal(2, 1, 2, 2)}, ValueError, "does not fit"),
        ({"bias": normal(3)}, ValueError, "do not belong"),
    ],
)
def test_what_does_not_go_together_is_refused(change, error, says):
    from noisegate.kernels import convolution, images
    from noisegate.kernels.windows import Window

    given = {"a": normal(2, 1, 5, 5), "weight": normal(4, 1, 3, 3), "bias": None} | change
    window = Window((3, 3), (1, 1), (0, 0), (1, 1))
    with pytest.raises(error, match=says):
        images.convolve(*given.values(), window)
    with pytest.raises(ValueError, match="do not belong"):
        images.input_gradient(normal(2, 4, 3, 3), given["weight"], torch.Size((2, 1, 6, 6)), window)
    with pytest.raises(ValueError, match="do not belong"):
        convolution.weight_gradients(normal(2, 1, 5, 5), normal(2, 4, 4, 3), *window)
    with pytest.raises(TypeError, match="float32"):
        convolution.weight_gradients(normal(2, 1, 5, 5).double(), normal(2, 4, 3, 3), *window)


# --- the KS test and rows --------------------------------------------------------------------------------------------


def uploads_of_every_kind(d: int, std: float) -> Tensor:
    """Noise, noise that is off by a little more in each row, and rows that are no noise at all."""
    rows = normal(9, d)
    rows[:3] += torch.tensor([[0.05], [0.1], [0.3]])
    rows[3:5] *= torch.tensor([[1.1], [1.4]])
    rows[5], rows[6], rows[7, 0] = 0.0, 1e30, -1e30
    return std * rows


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")  # numpy's, of a guess far off
@pytest.mark.parametrize("std", [1.0, 1e-3])
@pytest.mark.parametrize("d", [1, 50, 3000])
def test_counts_of_the_ks_test(d, std):
    from noisegate.kernels import counting

    values, edges = uploads_of_every_kind(d, std), ks_test._edges(d, std, 0.05, torch.device("cpu"))
    wanted = ks_test._any_outside(values, edges)
    threshold = ks_test.ks_threshold(d, 0.05)
    # A guess that is right, and two that leave every place to be found by bisection.
    for guess in (counting.Guess(1 / std, threshold), counting.Guess(1e9, 0.0), counting.Guess(1e-9, 1.0)):
        assert torch.equal(counting.any_outside(values, edges.at, edges.least, edges.most, guess), wanted)
    assert d < 50 or 0 < wanted.sum() < len(wanted)
    assert counting.any_outside(values[:0], edges.at, edges.least, edges.most, guess).shape == (0,)


@pytest.mark.parametrize("values", [[0.0, -1.0, 1.0, 0.0, 3.0, -2.0], [0.0, 1.0]])
def test_a_value_on_an_edge_is_not_below_it(values):
    """Wherever the guess is: the second values' is one place off."""
    from noisegate.kernels import counting

    row, at = torch.tensor([values]), torch.tensor([-1.0, 0.0, 0.0, 1.0, torch.inf])
    below = (row[0] < at[:, None]).sum(1, dtype=torch.int32)
    for inv_std, threshold in ((1.0, 0.0), (1e9, 1.0)):
        guess = counting.Guess(inv_std, threshold)
        assert not counting.any_outside(row, at, below, below, guess).any()
        for j in range(len(at)):
            more = below + (torch.arange(len(at)) == j).int()
            assert counting.any_outside(row, at, more, more, guess).all()


def test_counts_of_rows_too_long_for_two_counts_in_a_word():
    from noisegate.kernels import counting

    d = counting.PACKED_LIMIT + 5
    assert counting.Layout.of(d - 6, 2 * d).packed
    assert not counting.Layout.of(d, 2 * d).packed
    values, edges = normal(2, d, seed=1), ks_test._edges(d, 1.0, 0.05, torch.device("cpu"))
    values[1] *= 1.05
    wanted = ks_test._any_outside(values, edges)
    guess = counting.Guess(1.0, ks_test.ks_threshold(d, 0.05))
    assert torch.equal(counting.any_outside(values, edges.at, edges.least, edges.most, guess), wanted)
    assert wanted.tolist() == [False, True]


@pytest.mark.parametrize("d", [1, 9001])
def test_rows_are_cleared_or_left_alone(d):
    from noisegate.kernels.rows import clear_rows

    rows, absent = normal(6, d), torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    rows[1] = torch.nan
    wanted = rows.masked_fill(absent[:, None], 0.0)
    clear_rows(rows, absent)
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("size", [10, 9001])
def test_copies_are_made_or_not(size):
    from noisegate.kernels.rows import copy_if

    value, old = normal(size), torch.zeros(size)
    copy_if(torch.tensor(False), value, old)
    assert not old.any()
    copy_if(torch.tensor(True), value, old)
    assert torch.equal(old, value)
