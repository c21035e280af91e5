"""The part of pairing that both sides share: frames, deadlines, failure, and the steps that are the same.

A failure is one event, ``PairingBroke``, with a PairingFailed. Its message quotes the other side only
for its name, and only once the code is accepted: until then the other side may be any machine.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from fleetd import limits
from fleetd.errors import IdentityRefused, PairingClosed, PairingFailed
from fleetd.p2p.membership import keys
from fleetd.p2p.membership.roster import Signer
from fleetd.p2p.membership.roster_record import RosterRecord, clean_name, is_name, subject_of
from fleetd.p2p.pairing import messages as wire
from fleetd.p2p.pairing.key_agreement import Keys, Pake, Role, transcript
from fleetd.p2p.pairing.messages import Message, PairingHello, PakeShare, Proof, Records, Refusal, Refuse

# ---- Events ----------------------------------------------------------------------------------------------


class CodeAccepted(msgspec.Struct, frozen=True):
    """Both sides have the code, and each has the key of its certificate. People compare ``phrase``."""

    certificate: bytes
    node_id: str
    name: str
    phrase: str


class Admitted(msgspec.Struct, frozen=True):
    """The joiner puts the inviter and these into the roster, saves it, and calls ``saved``."""

    records: tuple[RosterRecord, ...]


class Joined(msgspec.Struct, frozen=True):
    """The inviter puts the joiner and these into the roster, saves it, and calls ``saved``."""

    records: tuple[RosterRecord, ...]


class PairingDone(msgspec.Struct, frozen=True):
    """Both machines have each other on disk."""


class PairingBroke(msgspec.Struct, frozen=True):
    error: PairingFailed


Event = CodeAccepted | Admitted | Joined | PairingDone | PairingBroke

# ---- What both sides do ----------------------------------------------------------------------------------

# Not bound: a side that kept a bound method would keep itself until the garbage collector comes.
_Handler = Callable[[Any, Message, float], list[Event]]
_M = TypeVar("_M", bound=Message)


class Side(abc.ABC):
    """Frames, deadlines, failure, and the steps that are the same on both sides."""

    role: Role

    def __init__(self, me: Signer, name: str, now: float, random_bytes: Callable[[int], bytes]) -> None:
        self.failed: PairingFailed | None = None
        #: True once the other side has refused.
        self.refused = False
        self.done = False
        #: When to call ``tick``; None while this machine itself is at work.
        self.deadline: float | None = now + limits.PAIRING_STEP_S
        self._me = me
        self._random_bytes = random_bytes
        self._in = bytearray()
        self._out = bytearray()
        self._handle: _Handler = Side._on_hello
        self._at_work: Literal["", "asking", "saving"] = ""
        self._peer: PairingHello
        self._peer_id = ""
        # Bodies as they were sent, by sender, for the transcript.
        self._bodies: dict[tuple[Role, type[Message]], bytes] = {}
        self._keys: Keys
        self._sealed = False
        self._records: list[RosterRecord] = []
        shown = clean_name(name, keys.short_id(me.node_id))
        self._send(PairingHello(wire.VERSIONS, me.certificate, shown, random_bytes(wire.NONCE_BYTES)))

    # ---- in and out --------------------------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """All bytes to write now; also after a failure, to tell the other side."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Handle bytes of the other side, in any pieces."""
        events: list[Event] = []
        self._in += data
        try:
            while not self._over and (body := wire.take_frame(self._in)) is not None:
                events += self._on_body(body, now)
        except PairingFailed as error:
            events += self._fail(error, "broken")
        if self._over:
            self._in.clear()
        return events

    def tick(self, now: float) -> list[Event]:
        """Fail if an answer takes too long."""
        if self._over or self.deadline is None or now < self.deadline:
            return []
        return self._fail(PairingFailed("Pairing took too long: no answer came in time."), "broken")

    def disconnected(self) -> list[Event]:
        """The connection was closed."""
        if self._over:
            return []
        return self._fail(PairingFailed("The other machine broke off the connection."), None)

    def cancel(self, reason: str = "Pairing was cancelled at this machine.") -> list[Event]:
        """The person at this machine declines; the other side is told."""
        if self._over:
            return []
        return self._fail(PairingFailed(reason), "declined")

    def give_up(self, reason: str) -> list[Event]:
        """This machine cannot continue; the other side is told so, without the reason."""
        if self._over:
            return []
        return self._fail(PairingFailed(reason), "broken")

    @property
    def _over(self) -> bool:
        return self.done or self.failed is not None

    def _on_body(self, body: bytes, now: float) -> list[Event]:
        message = wire.decode(self._keys.open(body) if self._sealed else body)
        if isinstance(message, Refuse):
            self.refused = True
            return self._fail(self._refused(message.reason), None)
        self._bodies.setdefault(("inviter" if self.role == "joiner" else "joiner", type(message)), body)
        return self._handle(self, message, now)

    def _send(self, message: Message) -> None:
        body = wire.encode(message)
        self._bodies.setdefault((self.role, type(message)), body)
        self._out += wire.frame(self._keys.seal(body) if self._sealed else body)

    def _fail(self, error: PairingFailed, tell: Refusal | None) -> list[Event]:
        if tell is not None:
            self._send(Refuse(tell))
        # Without the frames that raised it, which have this side in them.
        self.failed = error.with_traceback(None)
        self.deadline = None
        return [PairingBroke(error)]

    def _refused(self, reason: Refusal) -> PairingFailed:
        who = self._peer.name if self._sealed else "The other machine"
        match reason:
            case "wrong_code":
                return wrong_code()
            case "closed":
                return PairingClosed(
                    "The other machine no longer takes this code.", hint="Get a new one with `fleetctl pair`."
                )
            case "declined":
                return PairingFailed(f"{who} declined.")
            case "version":
                return _no_version()
            case "itself":
                return _itself()
            case "broken":
                return PairingFailed(f"{who} gave up.", hint="Its log says why.")

    # ---- steps -------------------------------------------------------------------------------------------

    def _await(self, handle: _Handler, now: float, within_s: float = limits.PAIRING_STEP_S) -> None:
        self._handle = handle
        self.deadline = now + within_s

    def _begin(self, work: Literal["asking", "saving"], deadline: float | None) -> None:
        """Begin work of this machine; until it ends, a message of the other side is an error."""
        self._handle = Side._on_nothing
        self._at_work = work
        self.deadline = deadline

    def _end(self, work: Literal["asking", "saving"]) -> bool:
        """End the work; False if the exchange is over."""
        if self._over:
            return False
        if self._at_work != work:
            raise RuntimeError(f"pairing is not {work}")
        self._at_work = ""
        return True

    def _on_nothing(self, message: Message, now: float) -> list[Event]:
        raise PairingFailed("The other side spoke out of turn.")

    def _on_hello(self, message: Message, now: float) -> list[Event]:
        self._peer = hello = of_kind(message, PairingHello)
        oldest, newest = hello.versions
        if oldest > wire.VERSIONS[1] or newest < wire.VERSIONS[0]:
            return self._fail(_no_version(), "version")
        try:
            self._peer_id = subject_of(hello.certificate)[0]
        except IdentityRefused as error:
            raise PairingFailed(f"The other side's certificate is refused: {error.message}") from None
        if not is_name(hello.name):
            raise PairingFailed("The other side has a name that cannot be shown.")
        if self._peer_id == self._me.node_id:
            return self._fail(_itself(), "itself")
        return self._met(now)

    @abc.abstractmethod
    def _met(self, now: float) -> list[Event]:
        """Called when both certificates are known."""

    def _pake(self, secret: bytes) -> Pake:
        mine, theirs = self._me.certificate, self._peer.certificate
        joiner, inviter = (mine, theirs) if self.role == "joiner" else (theirs, mine)
        return Pake(self.role, secret, joiner, inviter, self._random_bytes)

    def _agree(self, key: bytes) -> None:
        """Bind the key to every frame so far."""
        order: tuple[tuple[Role, type[Message]], ...] = (
            ("joiner", PairingHello),
            ("inviter", PairingHello),
            ("joiner", PakeShare),
            ("inviter", PakeShare),
        )
        self._keys = Keys(self.role, key, transcript(self._bodies[part] for part in order))

    def _prove(self) -> None:
        """Send this side's signature; this and all later bodies are sealed."""
        self._sealed = True
        self._send(Proof(self._me.sign(self._keys.to_sign)))

    def _proven(self, message: Message) -> CodeAccepted:
        key = subject_of(self._peer.certificate)[1]
        if not keys.verify(key, of_kind(message, Proof).signature, self._keys.to_verify):
            raise PairingFailed("The other side does not have the key of the certificate that it showed.")
        return CodeAccepted(self._peer.certificate, self._peer_id, self._peer.name, self._keys.phrase)

    def _send_records(self, records: Iterable[RosterRecord]) -> None:
        for part in wire.parts(records):
            self._send(part)

    def _all_records(self, message: Message, now: float) -> tuple[RosterRecord, ...] | None:
        """All records, once the last part has arrived; None before."""
        part = of_kind(message, Records)
        if part.more and not part.records:
            raise PairingFailed("The other side sends a part of its records without any.")  # and could go on
        self._records += part.records
        # A roster may exceed its bound by the records of its own machine, but not by a factor of two.
        if len(self._records) > 2 * limits.ROSTER_RECORDS:
            raise PairingFailed(f"The other side sent more than {2 * limits.ROSTER_RECORDS} records.")
        if part.more:
            self._await(self._handle, now)
            return None
        self._begin("saving", None)
        return tuple(self._records)


def wrong_code() -> PairingFailed:
    return PairingFailed(
        "The code is not the one that the inviting machine shows, or a machine in between changed a message.",
        hint="Type it again as it is shown.",
    )


def _no_version() -> PairingFailed:
    return PairingFailed(
        "The two machines speak no common version of the pairing protocol.",
        hint="Update fleetd on the older one.",
    )


def _itself() -> PairingFailed:
    return PairingFailed("This code is this machine's own: pairing needs two machines.")


def of_kind(message: Message, kind: type[_M]) -> _M:
    if not isinstance(message, kind):
        raise PairingFailed("The other side spoke out of turn.")
    return message
