"""Makes everything for a trial on one machine: folders of a server and of four workers, Flower's certificates and keys.

    python examples/flower/prepare.py trial

In a real federation each of them is made by its owner, on the owner's machine: docs/flower.md.
"""

import secrets
import sys
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from noisegate.data import hold_out, load
from noisegate.federation.certificates import make_authority, make_request, sign_request
from noisegate.federation.keys import write_private
from noisegate.flower import make_host
from noisegate.streams import stream

FEDERATION = """run = "{run}"
title = "digits on Flower"
model = "mlp"
shape = [{shape}]
classes = 10
rounds = {rounds}
batch = 48
declared = 350
sigma = {sigma}
rate = 0.5
believed_honest = 3
quorum = 3
listen = "127.0.0.1:{port}"
gather = 120.0
deadline = 90.0
least = 60.0
stall = 600.0
evaluate_every = 10
"""

POLICY = """epsilon = 8.0
delta = 1e-4
server = ["{key}"]
sigma = 0.8
batch = 64
declared = 300
parameters = 100000
"""

SUPERLINK = """[superlink]
default = "trial"
[superlink.trial]
address = "127.0.0.1:{port}"
root-certificates = "{ca}"
"""


def prepare(
    folder: Path, workers: int = 4, ports: tuple[int, int] = (7443, 8101), rounds: int = 200, sigma: float = 2.0
) -> str:
    """Make the folders. ports: of noisegate's stream, of the SuperLink. The server's public key."""
    digits = load("digits")
    own, rest = hold_out(digits.y, digits.classes, 2, stream(1, "auxiliary"))
    key = make_host(folder / "server", ["127.0.0.1"])
    shape = ", ".join(map(str, digits.shape))
    given = {"run": secrets.token_hex(32), "shape": shape, "rounds": rounds, "sigma": sigma, "port": ports[0]}
    (folder / "server" / "federation.toml").write_text(FEDERATION.format(**given))
    x, y = digits.x.numpy(), digits.y.numpy()
    tests = {"x_test": digits.x_test.numpy(), "y_test": digits.y_test.numpy()}
    np.savez(folder / "server" / "auxiliary.npz", x=x[own.numpy()], y=y[own.numpy()], **tests)
    parts = rest[torch.randperm(len(rest), generator=stream(1, "partition"))].chunk(workers)
    for i, part in enumerate(parts):
        node = folder / "nodes" / str(i)
        node.mkdir(mode=0o700, parents=True, exist_ok=True)
        np.savez(node / "data.npz", x=x[part.numpy()], y=y[part.numpy()])
        (node / "policy.toml").write_text(POLICY.format(key=key))
    make_flower(folder / "flower", workers, ports[1])
    return key


def make_flower(folder: Path, workers: int, port: int) -> None:
    """Flower's own: a certificate of the SuperLink, a key for each SuperNode, and where `flwr` finds the SuperLink."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = make_authority("trial of flower")
    tls, request = make_request("superlink", secrets.token_bytes(32), ["127.0.0.1", "localhost"])
    (folder / "ca.crt").write_bytes(authority.certificate)
    (folder / "superlink.pem").write_bytes(sign_request(authority, request, server=True))
    write_private(folder / "superlink.key", tls)
    openssh, private, none = (
        serialization.Encoding.OpenSSH,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    for i in range(workers):
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(folder / f"node{i}", key.private_bytes(serialization.Encoding.PEM, private, none))
        public = key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH)
        (folder / f"node{i}.pub").write_bytes(public)
    (folder / "config.toml").write_text(SUPERLINK.format(port=port, ca=(folder / "ca.crt").absolute()))


if __name__ == "__main__":
    print("the server's public key is", prepare(Path(sys.argv[1])))
