"""What may happen: the settings of everything, and the steps of a history."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from kvreturn.settings.types import Proof, Return
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
class SecondP:
    """A prefill node beside the first.

    Attributes:
        connector: of it.
        flag: its `bidirectional_kv_xfer`.
    """

    connector: ConnectorKind = "kvreturn"
    flag: bool = True


@dataclass(frozen=True)
class Setup:
    """Settings.

    Attributes:
        proof: the router's proof level.
        returns: the router's `return`.
        adapter_returns: the same for the model that is an adapter.
        waits: whether the next turn waits for a return that is under way; otherwise each of them is late.
        concurrency: returns that one P runs at a time.
        p: connector of P.
        flag: P's `bidirectional_kv_xfer`; None: just where the README says that it is needed.
        p2: another P, if there is one.
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
    returns: Return = "lazy"
    adapter_returns: Return = "lazy"
    waits: bool = True
    concurrency: int = 2
    p: ConnectorKind = "kvreturn"
    flag: bool | None = None
    p2: SecondP | None = None
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
        """P's `bidirectional_kv_xfer`."""
        return self.p == "kvreturn" or self.proof in ("router", "trusted") if self.flag is None else self.flag

    @property
    def keeps_at_d(self) -> bool:
        """D's. It has no use without read-back, and a stock D would keep all blocks of all turns for the whole TTL."""
        return self.proof != "off" or self.returns != "lazy"

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
        connectors = {self.p, self.d, self.p2.connector if self.p2 else self.p}
        return connectors == {"kvreturn"} or not TEMPLATES[self.template].date


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
class Back:
    """The eager return of a turn is held up.

    Attributes:
        where: in the `queue`; when it is about to be `sent`; in node `P`; when its answer has `come`.
        nth: which time that it comes there.
        meanwhile: as for `Pause`.
        then: it goes on at once; after the next steps, or when the next turn waits for it; its deadline has passed.
    """

    where: Literal["queue", "sent", "P", "come"]
    nth: int = 1
    meanwhile: tuple[str | float, ...] = ()
    then: Literal["go", "later", "late"] = "go"


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
    back: Back | None = None


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
    """A process is replaced. A `router` ends what it has begun; of a `killed router`, no return is left."""

    who: str


@dataclass(frozen=True)
class Fail:
    """The next request to a node goes wrong (`kvreturn.sim.Fault`), or the next to its `/tokenize`."""

    who: Literal["P", "P2", "D"]
    kind: FaultKind
    status: int = 500
    tokenizing: bool = False


@dataclass(frozen=True)
class Away:
    """A P cannot be reached by the next request: as Envoy does, it goes to the other one unless that is forbidden."""

    who: Literal["P", "P2"]


Step = Turn | Together | Wait | Restart | Fail | Away


@dataclass(frozen=True)
class History:
    """What happens on what."""

    setup: Setup
    steps: tuple[Step, ...]
