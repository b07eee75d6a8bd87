"""The ClientApp: a model, the data and the policy of the folder that the node's config names."""

from flwr.app import Context

from noisegate.data import read_examples
from noisegate.federation.policy import Policy
from noisegate.federation.worker import Worker
from noisegate.flower import client_app, node_folder
from noisegate.models import build_model
from noisegate.streams import stream


def worker(context: Context) -> Worker:
    """The worker at this node. The model's weights come from the server."""
    folder = node_folder(context)
    x, y = read_examples(folder / "data.npz")
    model = build_model("mlp", tuple(x.shape[1:]), 10, stream(0, "weights"))
    return Worker(model, (x, y), Policy.read(folder / "policy.toml"))


app = client_app(worker)
