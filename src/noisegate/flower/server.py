"""The ServerApp: the run config says which mode."""

from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.flower.grid import SteadyGrid
from noisegate.flower.rounds import MessageServer
from noisegate.flower.strategy import NoisegateStrategy
from noisegate.flower.stream import run_server

MODES = ("stream", "message")


def server_app(make: Callable[[Context], MessageServer], silence: float = 300.0) -> ServerApp:
    """A ServerApp that runs a federation's server. make: the server of a run; its folder holds keys and state.

    The run config says `workers`, how many nodes take part; `mode`, stream or message; and, for the stream, `address`,
    the "host:port" at which nodes reach it, empty for where the server listens. silence: seconds without the server
    after which a ClientApp ends, so that its SuperNode can do other things.
    """
    checks.positive(silence=silence)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        workers, mode = setting(context, "workers", int), setting(context, "mode", str)
        checks.one_of(MODES, mode=mode)
        if mode == "message":
            NoisegateStrategy(make(context), workers).run(grid)
        else:
            run_server(make(context), SteadyGrid(grid), workers, setting(context, "address", str), silence)

    return app


def setting(context: Context, name: str, kind: type) -> Any:
    """A setting of the run config. SpecError if it is missing, or of another kind."""
    value = context.run_config.get(name)
    if type(value) is not kind:
        raise SpecError(f"{name} = {checks.shown(value)}: the run config must say it; it is a {kind.__name__}")
    return value
