"""Stream mode: Flower starts and authenticates everyone, and the rounds run over noisegate's own stream."""

import asyncio
import time
from typing import Any

from noisegate import checks
from noisegate.errors import FederationError
from noisegate.federation.server import Server
from noisegate.flower.grid import SteadyGrid
from noisegate.flower.host import NodeEnrollment
from noisegate.flower.launcher import Launcher

LOOK = 1.0
"""Seconds between two looks at the nodes."""

FAREWELL = 30.0
"""Seconds that nodes have to reply once the run is over."""


def run_server(
    server: Server, grid: SteadyGrid, workers: int, address: str = "", silence: float = 300.0
) -> dict[str, Any] | None:
    """Enroll so many nodes, start a worker at each, and run the server to its end. The result, as of `Server.run`.

    address: where workers reach the stream; unless given, where the server listens.
    """
    checks.count(workers=workers)
    launcher = Launcher(grid, NodeEnrollment.of(server.settings.folder, workers), tell)
    enroll(launcher, workers, server.settings.gather)
    launcher.enrollment.write(server.settings.folder)
    return asyncio.run(_serve(server, launcher, address, silence))


def enroll(launcher: Launcher, workers: int, seconds: float) -> None:
    """Enroll so many workers, or all of the roster. FederationError if fewer than that come in time."""
    until = time.monotonic() + seconds
    wanted = len(launcher.enrollment.keys) if launcher.enrollment.fixed else workers
    while len(launcher.enrolled) < wanted:
        launcher.look()
        if len(launcher.enrolled) >= wanted or (launcher.enrollment.fixed and time.monotonic() >= until):
            break
        if time.monotonic() >= until:
            raise FederationError(
                f"workers = {workers}: {len(launcher.enrolled)} nodes enrolled within {seconds:g} seconds; start the "
                "others, or ask for fewer workers"
            )
        time.sleep(LOOK)


async def _serve(server: Server, launcher: Launcher, address: str, silence: float) -> dict[str, Any] | None:
    """Run the server, and look after the nodes meanwhile."""
    running = asyncio.create_task(server.run())
    host, _ = server.settings.address()
    while not running.done():
        if server.port and launcher.about is None:
            launcher.about = {"address": address or f"{host}:{server.port}", "silence": silence}
            tell(f"the stream is at {launcher.about['address']}")
        await asyncio.to_thread(_look, launcher)
        await asyncio.wait({running}, timeout=LOOK if server.port else 0.1)
    result = await running
    until = time.monotonic() + FAREWELL
    while launcher.running and time.monotonic() < until:
        await asyncio.to_thread(_look, launcher)
        await asyncio.sleep(LOOK)
    return result


def _look(launcher: Launcher) -> None:
    """Look after the nodes. Rounds need no SuperLink, so they go on where it cannot be reached."""
    try:
        launcher.look()
    except Exception as error:  # noqa: BLE001  # of whatever library Flower speaks to its SuperLink with
        tell(f"Flower cannot be reached: {checks.told(error)[:200]}")


def tell(text: str) -> None:
    """Print a line to the ServerApp's log, which `flwr log` shows."""
    print(f"noisegate: {checks.plain(text)}", flush=True)
