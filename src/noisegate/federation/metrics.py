"""Numbers for operators: Prometheus text on a port of this machine, off unless a port is given."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from noisegate.errors import FederationError

PATIENCE = 5.0
"""Seconds that a reader has to ask."""

MOST_REQUEST = 2**13
"""Bytes of a request."""


async def start_metrics(port: int, status: Callable[[], Mapping[str, Any]]) -> asyncio.Server:
    """Answer every request on 127.0.0.1:port with the numbers of a status."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(PATIENCE):
                await reader.readuntil(b"\r\n\r\n")
                body = text_of(status()).encode()
                head = (
                    f"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_server(answer, "127.0.0.1", port, limit=MOST_REQUEST)
    except OSError as error:
        raise FederationError(
            f"metrics = {port}: cannot be listened on ({error.strerror}); choose another port, or 0 for none"
        ) from None


def text_of(status: Mapping[str, Any]) -> str:
    """A status as Prometheus reads it."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    alone = (
        ("round", "gauge", "The number of the last judged round.", status["round"]),
        ("rounds_judged_total", "counter", "Rounds that were judged.", status["judged"]),
        ("rounds", "gauge", "Round numbers of the run.", status["rounds"]),
        ("connected_workers", "gauge", "Workers that are connected.", len(status["connected"])),
        ("paused", "gauge", "1 while there is no quorum.", int(status["state"] == "paused")),
        ("stall_left_seconds", "gauge", "Seconds that are left for waiting.", status["stall_left"]),
        ("round_seconds", "gauge", "Seconds that the last round took.", status["seconds"]),
        ("accuracy", "gauge", "Accuracy of the last model that was examined.", status["accuracy"]),
    )
    for name, kind, words, value in alone:
        if value is not None:
            yield from (f"# HELP noisegate_{name} {words}", f"# TYPE noisegate_{name} {kind}")
            yield f"noisegate_{name} {float(value):.10g}"
    workers = status["workers"].items()
    yield from (
        "# HELP noisegate_worker_rounds_total Rounds by status.",
        "# TYPE noisegate_worker_rounds_total counter",
    )
    for worker, entry in workers:
        for word, times in entry["rounds"].items():
            yield f'noisegate_worker_rounds_total{{worker="{escaped(worker)}",status="{escaped(word)}"}} {times}'
    for name, kind, words, key in (
        ("worker_weight_total", "counter", "The sum of a worker's weights.", "weight_total"),
        ("worker_uploads_total", "counter", "Uploads that were received.", "counter"),
        ("worker_missed_deadlines", "gauge", "k of the patience rule.", "k"),
        ("worker_connected", "gauge", "1 while a worker is connected.", "connected"),
    ):
        yield from (f"# HELP noisegate_{name} {words}", f"# TYPE noisegate_{name} {kind}")
        for worker, entry in workers:
            yield f'noisegate_{name}{{worker="{escaped(worker)}"}} {float(entry[key]):.10g}'


def escaped(label: str) -> str:
    """A label's value as the format writes it."""
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
