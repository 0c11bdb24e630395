"""What may happen: the settings of everything, and the steps of a history, as hypothesis draws them."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from kvreturn.config import Proof
from kvreturn.sim import TEMPLATES
from kvreturn.sim.config import ConnectorKind
from kvreturn.sim.tokenizer import Kind
from kvreturn.sim.words import WORDS

Json = dict[str, Any]

MODEL, ALIAS, ADAPTER = "sim", "sim-2026", "lora"
_LEASE = 30  # seconds; vLLM's `kv_lease_duration`
# Seconds for which D keeps blocks, and for which the router would use a handle.
_TTLS = [(480.0, 450.0), (480.0, 450.0), (60.0, 450.0), (480.0, 40.0)]
# A minute, and at the other a day, is about to end.
_STARTS = [datetime(2026, 3, 31, 10, 29, 45, tzinfo=UTC), datetime(2026, 3, 31, 23, 59, 45, tzinfo=UTC)]


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
    start: datetime = _STARTS[0]
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
        nth: the how manieth time.
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
    """The next request to a node goes wrong (`kvreturn.sim.Fault`)."""

    who: Literal["P", "D"]
    kind: Literal["status", "malformed", "drop", "omit_params", "delay"]
    status: int = 500


Step = Turn | Together | Wait | Restart | Fail


@dataclass(frozen=True)
class History:
    """What happens on what."""

    setup: Setup
    steps: tuple[Step, ...]


# --- what clients write ---


def _prose(start: int, words: int) -> str:
    return " ".join(WORDS[(start + 7 * i) % len(WORDS)] for i in range(words)).capitalize() + "."


SYSTEMS = ("", _prose(3, 60), _prose(40, 140), "Übe dich in Geduld, 忍耐! " + _prose(5, 30))
TEXTS = (
    _prose(11, 12),
    "Go on.",
    _prose(77, 90),
    "ok",
    '{"result": [1, 2.50, "naïve café \\u00e9"], "done": true}\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>not special</think> <tool_call>",
    " starts with a space, ends with one ",
    "日本語 🌍 →\n\n\tif x == 10**9 + 7:\n\t\treturn 'ok'\r\n",
    _prose(200, 40),
    "",
)


def _tool(name: str, **properties: Json) -> Json:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


_READ = _tool("read_file", path={"type": "string"}, lines={"type": "array", "items": {"type": "integer"}})
_SEARCH = _tool("search", word={"type": "string"}, kind={"enum": ["naïve", "exact"]}, deep={"type": "boolean"})
TOOLS: tuple[tuple[Json, ...], ...] = ((), (_READ,), (_READ, _SEARCH), (_SEARCH, _READ))

# Options of a request. What makes no sense in a request is an error that every node finds, or is ignored.
OPTIONS: tuple[Json, ...] = (
    {"max_tokens": 1},
    {"max_tokens": 30},
    {"max_completion_tokens": 7},
    {"max_tokens": 40, "ignore_eos": True},
    {"min_tokens": 40},
    {"stop": "."},
    {"stop": [" the", "er"], "include_stop_str_in_output": True},
    {"stop_token_ids": [46]},
    {"n": 2},
    {"n": 3, "max_tokens": 20},
    {"n": 2, "temperature": 0},
    {"return_token_ids": True},
    {"logprobs": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"tool_choice": "none"},
    {"tool_choice": "required"},
    {"parallel_tool_calls": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"include_reasoning": False},
    {"echo": True},
    {"min_tokens": 50, "max_tokens": 5},
    {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "remote_num_tokens": 48}},
    {"vllm_xargs": {"kv_transfer_params": {"x": 1}, "kept": "yes"}},
    {"model": "nobody"},
)


# --- how hypothesis draws them ---

_TALKS = st.builds(
    Talk,
    api=st.sampled_from(["chat", "chat", "chat", "chat", "text", "ids"]),
    tenant=st.sampled_from([0, 0, 1]),
    model=st.sampled_from([MODEL, MODEL, MODEL, ADAPTER]),
    salt=st.sampled_from([None, None, "salt"]),
    tools=st.integers(0, len(TOOLS) - 1),
    system=st.integers(0, len(SYSTEMS) - 1),
)

_STYLES = st.sampled_from([Style(), Style(reasoning="drop")]) | st.builds(
    Style,
    reasoning=st.sampled_from(["keep", "drop", "old name"]),
    arguments=st.sampled_from(["as they came", "compact", "sorted"]),
    content=st.sampled_from(["text", "part", "parts"]),
    empty=st.sampled_from(["null", "text", "missing"]),
    json=st.sampled_from(["compact", "spaced", "ascii"]),
)

HONEST = ("go_on",)
_CHANGES = (
    *["go_on"] * 12,
    *("regenerate", "regenerate", "retry", "retry", *["resume"] * 4, "edit", "edit", "delete", "shorten"),
    *("tools", "thinking", "model", "salt", "tenant", "picture", "picture", "finish_it", "batch"),
)


def _pauses() -> st.SearchStrategy[Pause]:
    passing = st.sampled_from([1.0, 16.0])  # over the end of a minute, and well within P's lease
    restarts = st.sampled_from(["P", "D", "router"])
    none: st.SearchStrategy[tuple[str | float, ...]] = st.just(())
    short: st.SearchStrategy[tuple[str | float, ...]] = none | st.tuples(passing)
    any_: st.SearchStrategy[tuple[str | float, ...]] = short | st.tuples(restarts) | st.tuples(passing, restarts)
    at_once = st.sampled_from(["go", "abort"])
    return st.one_of(
        st.builds(Pause, st.just("between"), meanwhile=any_, then=st.sampled_from(["go", "go", "later", "abort"])),
        st.builds(
            Pause, st.just("send"), st.integers(1, 9), any_, then=st.sampled_from(["later", "later", "go", "abort"])
        ),
        # In the midst of its work the node holds locks: others would wait for it, so it goes on at once. And a read
        # that has begun, once P saw that D still has time, is not made to last longer than what P allows for it.
        st.builds(Pause, st.just("P"), st.integers(1, 2), none | st.tuples(restarts), then=at_once),
        st.builds(Pause, st.just("D"), st.integers(1, 40), any_, then=at_once),
    )


def _turns(changes: tuple[str, ...], *, pauses: bool) -> st.SearchStrategy[Turn]:
    honest = changes == HONEST
    return st.builds(
        Turn,
        talk=st.sampled_from([0, 0, 0, 0, 1, 1, 2]),
        change=st.sampled_from(changes),
        at=st.integers(0, 11),
        text=st.integers(0, len(TEXTS) - 1),
        stream=st.booleans(),
        style=st.just(Style()) if honest else _STYLES,
        options=st.just(())
        if honest
        else st.just(()) | st.lists(st.integers(0, len(OPTIONS) - 1), max_size=2).map(tuple),
        cut=st.integers(0, 5),
        pause=_weighted((4, st.none()), (1, _pauses())) if pauses else st.none(),
    )


def _steps(changes: tuple[str, ...]) -> st.SearchStrategy[Step]:
    turn = _turns(changes, pauses=True)
    together = st.builds(Together, st.lists(_turns(changes, pauses=False), min_size=2, max_size=3).map(tuple))
    waits = st.builds(Wait, st.sampled_from([1.0, 44.0, 60.0, 420.0, 444.0, 464.0, 480.0, 86_400.0]))
    restarts = st.builds(Restart, st.sampled_from(["P", "D", "router"]))
    fails = st.builds(
        Fail,
        st.sampled_from(["P", "P", "P", "D"]),
        st.sampled_from(["status", "malformed", "drop", "omit_params", "delay"]),
        st.sampled_from([500, 503, 400]),
    )
    return _weighted((12, turn), (1, together), (1, waits), (1, restarts), (1, fails))


T = TypeVar("T")


def _weighted(*branches: tuple[int, st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """As `st.one_of`, which takes the same branch given twice for one."""
    order = [i for i, (weight, _) in enumerate(branches) for _ in range(weight)]
    return st.sampled_from(order).flatmap(lambda i: branches[i][1])


@dataclass(frozen=True)
class Kinds:
    """Which histories are drawn: proof level and connectors, and what varies besides."""

    proof: Proof
    p: ConnectorKind
    d: ConnectorKind
    templates: tuple[str, ...] = tuple(TEMPLATES)
    tokenizers: tuple[Kind, ...] = ("exact", "blurry")
    changes: tuple[str, ...] = _CHANGES


def histories(kinds: Kinds, *, length: int = 14) -> st.SearchStrategy[History]:
    """Histories of up to `length` steps."""
    ttls = st.sampled_from(_TTLS)
    rooms = st.sampled_from([8.0, 1.5, 1.0, 1.0])
    setups = st.builds(
        lambda ttl, **rest: Setup(decoder_ttl=ttl[0], store_ttl=ttl[1], **rest),
        ttls,
        proof=st.just(kinds.proof),
        p=st.just(kinds.p),
        d=st.just(kinds.d),
        template=st.sampled_from(kinds.templates),
        tokenizer=st.sampled_from(kinds.tokenizers),
        p_cache=st.sampled_from([False, False, True]),
        d_cache=st.booleans(),
        p_room=rooms,
        d_room=rooms,
        block_size=st.sampled_from([16, 8, 5]),
        threshold=st.sampled_from([0, 16, 64]),
        pass_token_ids=st.sampled_from([True, True, False]),
        fallback=st.booleans(),
        secret=st.sampled_from(["", "shared"]),
        start=st.sampled_from(_STARTS),
        modes=st.integers(0, 7),
        talks=st.lists(_TALKS, min_size=1, max_size=3).map(tuple),
    )
    steps = st.lists(_steps(kinds.changes), min_size=5, max_size=length).map(tuple)
    return st.builds(History, setups, steps)
