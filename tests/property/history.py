"""What may happen: the settings of everything, and the steps of a history."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from kvreturn.config import Proof
from kvreturn.sim import TEMPLATES
from kvreturn.sim.config import ConnectorKind
from kvreturn.sim.faults import FaultKind
from kvreturn.sim.tokenizer import Kind
from property.wording import MODEL

# A minute, and at the other a day, is about to end.
STARTS = (datetime(2026, 3, 31, 10, 29, 45, tzinfo=UTC), datetime(2026, 3, 31, 23, 59, 45, tzinfo=UTC))


@dataclass(frozen=True)
class Talk:
    """One conversation that a client may hold."""

    api: Literal["chat", "text", "ids"] = "chat"
    tenant: int = 0
    model: str = MODEL
    salt: str | None = None
    tools: int = 0
    system: int = 0


@dataclass(frozen=True)
class Setup:
    """Settings.

    Attributes:
        proof: the router's proof level.
        p: connector of P.
        d: connector of D.
        template: of all nodes.
        tokenizer: of all nodes.
        p_cache: whether P has a prefix cache.
        d_cache: whether D has one.
        p_room: P's KV blocks, as a multiple of what the longest sequence needs.
        d_room: the same of D.
        block_size: tokens per block.
        threshold: tokens, P's for a read and the router's for attaching a handle.
        pass_token_ids: whether D gets P's token ids.
        fallback: whether D does a turn alone if P fails.
        secret: of router and nodes.
        decoder_ttl: seconds for which D keeps blocks.
        store_ttl: seconds for which the router uses a handle.
        start: the clock's first reading.
        modes: index of Envoy's body modes.
        talks: the conversations.
        max_model_len: tokens of the longest sequence.
    """

    proof: Proof = "connector"
    p: ConnectorKind = "kvreturn"
    d: ConnectorKind = "kvreturn"
    template: str = "plain"
    tokenizer: Kind = "exact"
    p_cache: bool = True
    d_cache: bool = True
    p_room: float = 8.0
    d_room: float = 8.0
    block_size: int = 16
    threshold: int = 16
    pass_token_ids: bool = True
    fallback: bool = True
    secret: str = ""
    decoder_ttl: float = 480.0
    store_ttl: float = 450.0
    start: datetime = STARTS[0]
    modes: int = 0
    talks: tuple[Talk, ...] = (Talk(),)
    max_model_len: int = 768

    def blocks(self, room: float) -> int:
        """KV blocks of a node, the null block included."""
        return math.ceil(room * self.max_model_len / self.block_size) + 1

    @property
    def reads_at_p(self) -> bool:
        """P's `bidirectional_kv_xfer`. A stock P is switched on just where the README says so."""
        return self.p == "kvreturn" or self.proof in ("router", "trusted")

    @property
    def keeps_at_d(self) -> bool:
        """D's. It has no use without read-back, and a stock D would keep all blocks of all turns for the whole TTL."""
        return self.proof != "off"

    @property
    def shares_prompts(self) -> bool:
        """Whether several choices can be asked for: each loads P's one set of blocks, and the first frees it.

        Our connector lets just one of them load. Stock, it goes well as long as D has room for all at once.
        """
        return self.d == "kvreturn" or (self.d_room >= 8.0 and not self.keeps_at_d)

    @property
    def compares_prompts(self) -> bool:
        """Whether D finds out that P computed another prompt than its own.

        If it does not, and renders the prompt itself although the template has the time of day in it, then even plain
        disaggregated vLLM, without any read-back, goes wrong at midnight: nothing that a router could see.
        """
        return (self.p, self.d) == ("kvreturn", "kvreturn") or not TEMPLATES[self.template].date


@dataclass(frozen=True)
class Style:
    """How a client sends back what it was told.

    Attributes:
        reasoning: what it does with reasoning.
        arguments: how it writes tool arguments.
        content: how it writes text.
        empty: how it writes the content of a message that has none.
        json: how it writes JSON.
    """

    reasoning: Literal["keep", "drop", "old name"] = "keep"
    arguments: Literal["as they came", "compact", "sorted"] = "as they came"
    content: Literal["text", "part", "parts"] = "text"
    empty: Literal["null", "text", "missing"] = "null"
    json: Literal["compact", "spaced", "ascii"] = "compact"


@dataclass(frozen=True)
class Pause:
    """A turn is held up.

    Attributes:
        where: see `cluster.Where`.
        nth: which time that it comes there.
        meanwhile: who is restarted, or how many seconds pass.
        then: it goes on at once, after the next steps, or its client leaves.
    """

    where: Literal["send", "between", "P", "D"]
    nth: int = 1
    meanwhile: tuple[str | float, ...] = ()
    then: Literal["go", "later", "abort"] = "go"


@dataclass(frozen=True)
class Turn:
    """A client asks. `change` names a method of `client.Conversation`, `at` and `text` are what it works with."""

    talk: int = 0
    change: str = "go_on"
    at: int = 0
    text: int = 0
    stream: bool = True
    style: Style = Style()
    options: tuple[int, ...] = ()
    cut: int = 0
    pause: Pause | None = None


@dataclass(frozen=True)
class Together:
    """Several at the same time."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing happens."""

    seconds: float


@dataclass(frozen=True)
class Restart:
    """A process is replaced."""

    who: str


@dataclass(frozen=True)
class Fail:
    """The next request to a node goes wrong (`kvreturn.sim.Fault`), or the next to its `/tokenize`."""

    who: Literal["P", "D"]
    kind: FaultKind
    status: int = 500
    tokenizing: bool = False


Step = Turn | Together | Wait | Restart | Fail


@dataclass(frozen=True)
class History:
    """What happens on what."""

    setup: Setup
    steps: tuple[Step, ...]
