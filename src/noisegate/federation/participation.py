"""One worker in one run: it agrees to terms, answers models, and takes receipts. Nothing leaves a worker but from here.

It believes nobody. What a server asks is checked against the worker's own policy and ledger, a model is checked before
it is used, and every answer is in the outbox and charged before it is handed out.
"""

import hashlib
import warnings
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from noisegate.entropy import Secret
from noisegate.errors import FederationError, NoisegateWarning, PolicyError
from noisegate.federation.keys import EVERYONE, SigningKey
from noisegate.federation.ledger import Ledger
from noisegate.federation.policy import Policy
from noisegate.federation.terms import Terms
from noisegate.federation.wire import NOBODY, Kind, Message, body_of, digest_of, read, say
from noisegate.protocol import Mechanism, upload_of_one
from noisegate.vectors import FlatModel
from noisegate.workers import WORKS, ignored_weights

BUDGET_SPENT = "budget spent"


@dataclass(frozen=True)
class Holder:
    """Who takes part. name: in certificate and roster. key: signs what it sends. examples: (x, y), never sent."""

    name: str
    key: SigningKey
    policy: Policy
    ledger: Ledger
    model: FlatModel
    examples: tuple[Tensor, Tensor]


class Maker(Protocol):
    """Makes the upload of a round."""

    def __call__(self, mechanism: Mechanism, round: int, params: Tensor, last: Tensor | None) -> Tensor:
        """(d,) what leaves. params: the model. last: what the server last received of this worker in this run."""
        ...


class Participation:
    """A worker that has agreed to the terms of a run.

    make: makes an upload; unless given, by the protocol, of the worker's examples and the operating system's entropy.
    """

    def __init__(self, holder: Holder, terms_message: Message, make: Maker | None = None) -> None:
        """Agree to the terms in a message of a server, or raise.

        FederationError if no server that the policy names signed it, or for this worker. SpecError if the terms are not
        well-formed. PolicyError if they ask for more than is allowed. StoreError if the ledger is an older copy.
        """
        self.holder, message, policy = holder, terms_message, holder.policy
        self.server = _signer(message, policy)
        if message.kind != Kind.TERMS or message.worker != holder.name:
            raise FederationError("the server's first message is not the terms for this worker; it is not believed")
        self.terms = Terms.of(message.text())
        if message.run.hex() != self.terms.run:
            raise FederationError("the server's terms are of another run than their message; it is not believed")
        policy.check(self.terms)
        if self.terms.parameters != holder.model.d:
            raise PolicyError(
                f"parameters = {self.terms.parameters}: the server trains another model than this worker, whose model "
                f"has {holder.model.d}; agree on one model"
            )
        self.mechanism = self.terms.mechanism(holder.model, holder.examples, policy.size)
        if line := ignored_weights(holder.model, self.mechanism.worker, holder.examples[0], WORKS):
            warnings.warn(line, NoisegateWarning, stacklevel=2)
        run, ledger = self.terms.run, holder.ledger
        ledger.begin(self.terms, self.server)
        ledger.check_receipt(run, message.counter)
        self.allowed = ledger.charged(run) + ledger.affordable(self.terms, policy.epsilon, policy.delta)
        """How many rounds of this run may be charged in all: what the budget allows, and no more than were agreed."""
        self.allowed = min(self.allowed, self.terms.rounds)
        self.outbox = ledger.outbox(run)
        self._make = make or _Honest(holder)
        if message.digest != NOBODY:  # the last upload that the server has: its receipt may have been lost
            self._take(message.digest)
        self._last = self._last_vector()
        self._sent: _SentUpload | None = None

    def answer(self, message: Message) -> bytes:
        """What to send for a model: an upload that is charged, or that there is none. Ready to be sent, signed.

        FederationError if the message is not a model of this run by this server.
        """
        params = self.checked_model(message, Kind.MODEL)
        ledger, run, model = self.holder.ledger, self.terms.run, message.digest.hex()
        if charge := ledger.charge_of(run, message.round):
            if charge.model != model:
                return self._decline(message, "another model was answered in this round")
            pending = self.outbox.pending()
            if pending is None or hashlib.sha256(pending.message).hexdigest() != charge.upload:
                return self._decline(message, "this round was answered before")
            return pending.message
        if message.round <= ledger.last_round(run):
            return self._decline(message, "a later round was answered before")
        if message.round >= self.terms.rounds or ledger.charged(run) >= self.allowed:
            return self._say(Kind.LEAVE, message, BUDGET_SPENT)
        upload = self._make(self.mechanism, message.round, params, self._last)
        body = body_of(upload.detach().cpu().numpy())
        answer = Message(Kind.UPLOAD, self.holder.name, message.run, message.round, message.digest, body=body)
        content = answer.signed(self.holder.key)
        self.outbox.put(content, message.round, model)
        ledger.charge(run, message.round, model, hashlib.sha256(content).hexdigest())
        self._sent = _SentUpload(message.round, digest_of(body), upload.detach())
        return content

    def acknowledge(self, message: Message) -> None:
        """Take a receipt: the upload of that round is what the server last received."""
        self._check(message, Kind.RECEIPT, self.holder.name)
        self.holder.ledger.check_receipt(self.terms.run, message.counter)
        if self._sent and self._sent.digest == message.digest:
            self.outbox.acknowledge(self._sent.round)
            self._last = self._sent.vector
        elif self._take(message.digest):
            self._last = self._last_vector()

    def checked_model(self, message: Message, kind: Kind) -> Tensor:
        """(d,) the model in a message, on this worker's device. FederationError if it is not one of this run."""
        self._check(message, kind, EVERYONE)
        d = self.holder.model.d
        if len(message.body) != 4 * d or digest_of(message.body) != message.digest:
            raise FederationError(f"the server sent a model that is not the {d} numbers of its digest; not believed")
        params = torch.from_numpy(message.vector().astype("=f4"))
        if not bool(torch.isfinite(params).all()):
            raise FederationError("the server sent a model with numbers that are not finite; it is not used")
        return params.to(self.holder.model.initial().device)

    def _check(self, message: Message, kind: Kind, worker: str) -> None:
        if message.kind != kind or message.worker != worker or message.run.hex() != self.terms.run:
            raise FederationError("the server sent a message that does not belong here; it is not believed")
        if not message.is_from(self.server):
            raise FederationError("the server's signature is wrong; its message is not believed")

    def _take(self, upload: bytes) -> bool:
        """Whether the pending upload is the one with this digest. Then the server has it."""
        if (pending := self.outbox.pending()) and digest_of(_body(pending.message)) == upload:
            self.outbox.acknowledge(pending.round)
            return True
        return False

    def _last_vector(self) -> Tensor | None:
        content = self.outbox.last()
        message = read(content) if content is not None else "none"
        if isinstance(message, str) or len(message.body) != 4 * self.holder.model.d:
            return None
        return torch.from_numpy(message.vector().astype("=f4")).to(self.holder.model.initial().device)

    def _decline(self, message: Message, why: str) -> bytes:
        return self._say(Kind.DECLINE, message, why)

    def _say(self, kind: Kind, message: Message, why: str) -> bytes:
        about = {"run": message.run, "round": message.round, "digest": message.digest}
        return say(kind, self.holder.name, self.holder.key, {"why": why}, **about)


class _SentUpload(NamedTuple):
    """The upload that was handed out last, so that its receipt needs no look at the disk."""

    round: int
    digest: bytes
    vector: Tensor


class _Honest:
    """Makes uploads by the protocol. Noise and batches come from the operating system, and none are drawn twice."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.secret = Secret(holder.model.initial().device)

    def __call__(self, mechanism: Mechanism, round: int, params: Tensor, last: Tensor | None) -> Tensor:
        self.secret.begin(round)
        return upload_of_one(mechanism, params, *self.holder.examples, last, self.secret.source)


def _signer(message: Message, policy: Policy) -> bytes:
    """The key of the server that signed it, one of those that the policy names."""
    for text in policy.server:
        if message.is_from(key := bytes.fromhex(text)):
            return key
    raise FederationError("the server's terms are signed by no key that this worker's policy names; not believed")


def _body(content: bytes) -> bytes | memoryview:
    message = read(content)
    return b"" if isinstance(message, str) else message.body
