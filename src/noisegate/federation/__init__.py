"""The protocol between real machines: gRPC with mutual TLS, signed messages, a ledger at every worker.

A worker is a few lines:

    from noisegate.federation import Policy, Worker

    worker = Worker(model, (x, y), Policy.read("hospital-a/policy.toml"))
    outcome = worker.join("hospital-a")

docs/federation.md takes two people on two machines through it; docs/wire.md has the format, docs/ledger.md the ledger.
"""

import importlib
import os
import typing

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads it when it is imported, and else tells of every goodbye

if typing.TYPE_CHECKING:
    from noisegate.federation.client import WorkerOutcome
    from noisegate.federation.ledger import Ledger
    from noisegate.federation.policy import Policy
    from noisegate.federation.server import Server
    from noisegate.federation.terms import Terms
    from noisegate.federation.worker import Worker

_HOMES = {
    "Ledger": "ledger",
    "WorkerOutcome": "client",
    "Policy": "policy",
    "Server": "server",
    "Terms": "terms",
    "Worker": "worker",
}
"""Where each name is. gRPC is imported by those who need it: a ledger can be read without."""


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["Ledger", "Policy", "Server", "Terms", "Worker", "WorkerOutcome"]
