"""The obvious way: make every example's gradient, mix, scale, add up. For any module; the oracle of the fast way."""

import torch
from torch import Tensor
from torch.func import grad, vmap

from noisegate.vectors import FlatModel, add_rows
from noisegate.views import Worker


def per_example_gradients(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(B, d): the gradient of each example's own loss."""

    def loss_of_one(vector: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
        return model.losses(vector, one_x[None], one_y[None])[0]

    gradients: Tensor = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(params, x, y)
    return gradients


def contributions(worker: Worker, gradients: Tensor, last_uploads: Tensor) -> Tensor:
    """(B, d): what each example adds to its worker's sum. Both arguments are (B, d).

    Lengths are taken in float64, so that neither overflow nor underflow can bend them.
    """
    mixed = ((1 - worker.momentum) * gradients + worker.momentum * last_uploads).double()
    norms = torch.linalg.vector_norm(mixed, dim=1, keepdim=True)
    usable = norms.isfinite() & (norms > 0)
    scaled = mixed * worker.weights(torch.where(usable, norms, 1.0))
    return torch.where(usable, scaled, 0.0).to(gradients.dtype)


def direct_sums(
    worker: Worker,
    model: FlatModel,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    owner: Tensor,
    last_uploads: Tensor,
    chunk: int = 128,
) -> Tensor:
    """(n, d): each worker's sum of contributions, before noise.

    x, y: the examples of all workers in one row; owner: (E,) the worker of each; last_uploads: (n, d).
    At most `chunk` gradients exist at once.
    """
    sums = torch.zeros_like(last_uploads)
    if not len(y):
        return sums
    for part in torch.arange(len(y), device=owner.device).split(chunk):
        gradients = per_example_gradients(model, params, x[part], y[part])
        add_rows(sums, owner[part], contributions(worker, gradients, last_uploads[owner[part]]))
    return sums
