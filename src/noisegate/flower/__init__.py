"""noisegate on Flower: Flower starts, enrolls and authenticates; the protocol is the same.

Stream mode: one message starts each worker, and the rounds run over noisegate's own stream. Message mode
(`NoisegateStrategy`): one Flower message per worker and round, for Flower's simulation and for few rounds. `server_app`
and `client_app` serve both. docs/flower.md shows how to run them.
"""

import importlib.util
import os
import sys

from noisegate.errors import SpecError

TELEMETRY = "FLWR_TELEMETRY_ENABLED"

if importlib.util.find_spec("flwr") is None:
    raise SpecError("flwr: is not installed; pip install 'noisegate[flower]'")
if "flwr" in sys.modules and os.environ.get(TELEMETRY) != "0":
    raise SpecError(
        f"{TELEMETRY} = {os.environ.get(TELEMETRY, '')!r}: Flower was imported with telemetry on; set it to 0 in the "
        "environment of the SuperLink, of every SuperNode and of this program"
    )
os.environ[TELEMETRY] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

from noisegate.flower.client import client_app  # noqa: E402
from noisegate.flower.host import make_host  # noqa: E402
from noisegate.flower.node import node_folder  # noqa: E402
from noisegate.flower.rounds import MessageServer  # noqa: E402
from noisegate.flower.server import server_app  # noqa: E402
from noisegate.flower.strategy import NoisegateStrategy  # noqa: E402

__all__ = ["MessageServer", "NoisegateStrategy", "client_app", "make_host", "node_folder", "server_app"]
