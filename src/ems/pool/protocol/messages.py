"""Every message of the wire: what clients ask and what the node answers.

Many keys travel as one byte string of 16 bytes each, many references as one of 12 bytes each.  Whatever a request has
room for has a bound (``limits``).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import INSTANCE_BYTES, REF_BYTES
from ems.pool.names import MAX_CHARACTERS, MAX_FACTS, MAX_NAME, Difference
from ems.pool.pages import ClusterWrite
from ems.pool.protocol import limits
from ems.pool.protocol.acts import Acts, Keys, Text
from ems.pool.protocol.limits import PROOF_BYTES

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
RequestId = Annotated[str, msgspec.Meta(max_length=limits.MAX_ID)]
Fact = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
AccessId = Annotated[str, msgspec.Meta(max_length=limits.MAX_CREDENTIAL)]
Secret = Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CREDENTIAL)]


FROM_NOW = -1
"""Where a client begins that wants to know of no changes before."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Storing(Message, frozen=True):
    """Base of what only those may ask who store and load: whoever administers a node with tenants does neither."""


# From the client


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """Greeting: protocol versions spoken, who is speaking, and whether to look after the node and not to store.

    ``access_id`` and ``nonce`` (random) are those of a client with an access key.
    """

    oldest: int
    newest: int
    client: Text
    pid: int
    administers: bool = False
    access_id: AccessId = ""
    nonce: Secret = b""
    instance: Annotated[bytes, msgspec.Meta(max_length=INSTANCE_BYTES)] = b""
    """A random number of this client, the same on each of its connections; see :class:`StillWriting`."""


class Prove(Message, frozen=True):
    """The client's proof that it knows its access key; answered by :class:`Welcome`."""

    proof: Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Open(Storing, frozen=True):
    """Open (or make) the namespace ``name`` with pages of ``page_size`` bytes; answered by :class:`Opened`.

    A reader that does not know the size says 0: nothing is made then.
    """

    name: Name
    page_size: int


class Attach(Storing, frozen=True):
    """Ask for a segment to map; answered by :class:`SegmentAttached`."""

    segment: int


class Reserve(Storing, frozen=True):
    """Promise slots for consecutive ``keys`` after ``parent``; answered by :class:`Granted`.

    The keys at the positions of ``tails`` are those of pages to be found by their tokens too.
    """

    namespace: int
    parent: Key
    keys: Keys
    tails: Annotated[dict[int, Tail], msgspec.Meta(max_length=limits.MAX_KEYS)] | None = None


class Commit(Storing, frozen=True):
    """Publish the pages at ``positions`` of a reservation (all, when None); answered by :class:`Done`.

    ``checksums`` are the CRC32C of their bytes, 4 bytes each, in the order of ``positions``, which are then named.
    """

    reservation: int
    positions: Annotated[list[int], msgspec.Meta(max_length=limits.MAX_KEYS)] | None = None
    checksums: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_KEYS * limits.CHECKSUM_BYTES)] = b""
    cluster_write: ClusterWrite = ""


class StillWriting(Storing, frozen=True):
    """Of all slots that earlier connections of this client were promised it may write into ``refs`` and no others.

    Reservations that expired are among them.  Answered by :class:`Done` with how many slots are free for that.
    """

    refs: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_KEYS * REF_BYTES)]


class Abort(Storing, frozen=True):
    """Give back what of a reservation was not committed; answered by :class:`Done`."""

    reservation: int


class Lookup(Storing, frozen=True):
    """How many leading ``keys`` are present, with a lease on them if ``lease``; answered by :class:`Hits`.

    With ``tail``: the page of that directory that shares most leading tokens.  Each of ``keys``, combined by XOR with
    the key of the page that is found, then names another page of the same chunk: a tier brings them up together.
    """

    namespace: int
    keys: Keys
    lease: bool = False
    tail: Tail | None = None
    request: RequestId = ""
    compute: int = 0
    """Microseconds that a page takes to be computed again, 0 when that is not known: what a tier below memory brings
    later than that is not fetched."""
    local_only: bool = False
    """Only what this host has counts, in memory or in folders: nothing is fetched from elsewhere, or waited for."""
    patience: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_PATIENCE)] = 0
    """Microseconds that the answer may wait until tiers that have to be asked have said what they have."""
    directories: Keys = b""
    """Directories where a tail may be looked for next, 16 bytes each: those of the chunks, of which ``keys`` name
    equally many pages, and of the one behind them, or zeros.  Who is asked for keys says in one go where none is."""


class Release(Storing, frozen=True):
    """A lease is no longer needed; has no answer."""

    lease: int


class Stats(Message, frozen=True):
    """Ask for the node's figures; answered by :class:`Figures`."""


class Changes(Storing, frozen=True):
    """What was stored and removed in ``namespaces`` after ``sequence`` or :data:`FROM_NOW` on.

    Answered by :class:`Changed`.
    """

    sequence: int
    namespaces: Annotated[list[Name], msgspec.Meta(max_length=limits.MAX_NAMESPACES_ASKED)]


class Corrupt(Storing, frozen=True):
    """The bytes of these leased pages do not match their checksums; answered by :class:`Done`.

    The node looks for itself, and counts those that it takes out of the pool.
    """

    namespace: int
    keys: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CORRUPT * KEY_BYTES)]
    refs: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CORRUPT * REF_BYTES)]


class Prefetch(Storing, frozen=True):
    """``keys`` will be needed soon: bring them from the tiers below memory; answered by :class:`Done`.

    The answer counts the leading ones that are in memory or on their way there.  ``local_only`` is that of a lookup.
    """

    namespace: int
    keys: Keys
    local_only: bool = False


class Describe(Storing, frozen=True):
    """What the namespace ``name`` means, in plain words by field; answered by :class:`Done`.

    It may not be open yet.  See :class:`ems.pool.names.Layouts`.
    """

    name: Name
    facts: Annotated[dict[Fact, Fact], msgspec.Meta(max_length=MAX_FACTS)]


class Miss(Storing, frozen=True):
    """A lookup of ``keys`` keys was wanted in the namespace ``name``, which is not there; answered by :class:`Hits`."""

    name: Name
    keys: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_KEYS)]
    request: RequestId = ""


class Explain(Message, frozen=True):
    """Why ``keys`` of the namespace ``name`` are there or not, counting nothing; answered by :class:`Explained`.

    ``local_only`` is that of the lookups that are meant.
    """

    name: Name
    keys: Keys
    local_only: bool = False


class Announce(Storing, frozen=True):
    """A request waits and will ask for ``keys``, perhaps ``local_only``; answered by :class:`Announced`."""

    namespace: int
    keys: Keys
    local_only: bool = False


class Withdraw(Storing, frozen=True):
    """The request of an announcement waits no longer; has no answer."""

    announcement: int


class Administer(Message, frozen=True):
    """Do ``act``, or with ``dry_run`` say what it would do; answered by :class:`Reported`.

    Only for the node's own user and root.
    """

    act: Acts
    dry_run: bool = False


# From the node


class Welcome(Message, frozen=True, forbid_unknown_fields=False):
    """The greeting was accepted: version to speak, the node's identity (new with each start), its segments.

    ``verify`` says which loaded pages are to be checked (see :class:`ems.pool.segments.reader.Verify`); pages with a
    stamp below ``trusted_from`` always are.
    """

    version: int
    node: str
    release: str
    autostarted: bool
    segments: int
    verify: str = ""
    trusted_from: int = 0
    signature: bytes = b""
    """After a challenge: the node's proof that it knows the tenant's verifier."""


class Challenge(Message, frozen=True):
    """The client is to prove that it knows its access key: the node's nonce, how the key is hashed."""

    nonce: bytes
    salt: bytes
    iterations: int
    user: int
    """The user that the node runs as, so that nobody can pass on its words as his own."""


class Opened(Message, frozen=True):
    """The namespace's number on this node; -1: there is none of that name yet, so nothing is stored in it."""

    namespace: int


class SegmentAttached(Message, frozen=True):
    """A segment of ``size`` bytes; its file descriptor travels beside this message."""

    segment: int
    size: int


class Granted(Message, frozen=True):
    """One outcome a key (a byte, see :class:`ems.pool.pages.Outcome`) and the references of the granted ones."""

    reservation: int
    outcomes: bytes
    refs: bytes


class Hits(Message, frozen=True):
    """``refs`` of the leading present pages, how many keys follow present or being written, the lease."""

    count: int
    pending: int
    lease: int
    refs: bytes
    key: bytes = b""
    """For a tail: the key of the page; ``count`` is then the tokens that it shares."""
    code: int = 0
    """Why the first key that is missing is missing, see :class:`ems.pool.reasons.words.Reason`."""
    below: int = 0
    """How many keys behind those of ``count`` come up, without a gap, from tiers below memory; ``pending`` has those of
    them whose memory is reserved.  For a tail: 1 if a page that shares more comes up."""


class Done(Message, frozen=True):
    """It is done; ``count`` pages were concerned."""

    count: int = 0


class Figures(Message, frozen=True):
    """The node's figures by name."""

    figures: dict[str, Any]


class ChangeRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of one kind in a row: pages of ``keys`` were stored, or removed.

    ``namespace`` is a position in the list of those that were asked for: a name a run would be too much.
    """

    namespace: int
    stored: bool
    keys: bytes


class Changed(Message, frozen=True):
    """Changes in the order in which they happened, and the ``sequence`` from which to go on.

    With ``lost`` more has happened than the node remembers, and nothing is told.
    """

    sequence: int
    lost: bool
    runs: list[ChangeRun]


class Explained(Message, frozen=True):
    """One reason a key (0: present), and all that is known of the first missing one.

    It is missing for ``seconds`` (negative: not known), its room went to the namespace ``winner``; ``layouts`` are
    others that the model has in the pool.
    """

    codes: bytes
    seconds: float = -1.0
    winner: str = ""
    layouts: list[Difference] = []

    @property
    def detail(self) -> str:
        """What is known of the first missing page beside its reason, for people."""
        parts = [f"{self.seconds:.0f} s ago"] if self.seconds >= 0 else []
        parts += [f"for {self.winner}"] if self.winner else []
        for other in self.layouts:
            fields = ", ".join(f"{name} is {theirs}, not {mine}" for name, (mine, theirs) in other.fields.items())
            parts.append(f"{other.namespace}: {fields or 'nothing known differs'}")
        return "; ".join(parts)


class Announced(Message, frozen=True):
    """The number of an announcement, which ends by :class:`Withdraw`, with its connection, or after a time."""

    announcement: int


class Reported(Message, frozen=True):
    """What an act did, or how far it is: plain figures by name."""

    report: dict[str, Any]


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The request was refused: a code of :data:`REFUSALS` and a sentence."""

    code: str
    reason: str


Request = (
    Hello | Prove | Open | Attach | Reserve | Commit | StillWriting | Abort | Lookup | Release | Stats | Changes
    | Prefetch | Describe | Miss | Explain | Corrupt | Announce | Withdraw | Administer
)  # fmt: skip
Answer = (
    Welcome | Challenge | Opened | SegmentAttached | Granted | Hits | Done | Figures | Changed | Explained | Announced
    | Reported | Refused
)  # fmt: skip
