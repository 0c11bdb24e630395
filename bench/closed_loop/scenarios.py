"""What is run: how much KV the nodes have room for, how many agents there are, and the ways to return KV."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvreturn.sim import NodeConfig, Timing

SCALE = 8
"""Real tokens for which one simulated token stands, so that real conversations take an eighth of the work."""

# An 8B model on one data-centre GPU, and 100 Gb/s between the nodes.
TIMING = Timing(
    prefill_rate=8_000 / SCALE,
    decode_rate=60 / SCALE,
    transfer_rate=10e9,
    bytes_per_token=131_072 * SCALE,
)
_BLOCK = 32 // SCALE
_THRESHOLD = 64 // SCALE  # vLLM's kv_recompute_threshold
MEAN_CONVERSATION = 1_000  # simulated tokens: what an agent's conversation has on D at an average turn


@dataclass(frozen=True, slots=True)
class Way:
    """A way to return KV.

    Attributes:
        name: in tables.
        settings: of the router.
        bidirectional: of both nodes.
    """

    name: str
    settings: Mapping[str, str] = field(hash=False)
    bidirectional: bool = True


WAYS = (
    Way("one-way", {"proof": "off", "return": "lazy"}, bidirectional=False),
    Way("lazy", {"return": "lazy"}),
    Way("eager", {"return": "eager"}),
    Way("auto", {"return": "auto"}),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run.

    Attributes:
        name: in tables.
        seconds: of virtual time.
        agents: how many are active.
    """

    name: str
    seconds: float
    agents: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run.

    Attributes:
        title: in tables.
        prefill_room: conversations for which P has KV blocks.
        decode_room: conversations for which D has KV blocks.
        phases: in order.
        warm_up: seconds before the first phase, with its agents; not counted.
    """

    title: str
    prefill_room: float
    decode_room: float
    phases: tuple[Phase, ...]
    warm_up: float = 40.0

    def nodes(self, way: Way) -> tuple[NodeConfig, NodeConfig]:
        """Settings of P and of D."""
        base = NodeConfig(
            connector="kvreturn",
            block_size=_BLOCK,
            max_model_len=4 * MEAN_CONVERSATION,
            recompute_threshold=_THRESHOLD,
            bidirectional=way.bidirectional,
            timing=TIMING,
            keep_requests=1,
        )
        return (
            replace(base, role="prefill", num_blocks=_blocks(self.prefill_room)),
            replace(base, role="decode", num_blocks=_blocks(self.decode_room)),
        )

    def settings(self, way: Way, prefill: str, decode: str) -> dict[str, Any]:
        """Of the router."""
        return {
            "pools": {"prefill": [prefill], "decode": [decode]},
            "prefill": {"via": "direct"},
            "limits": {"min_tokens": _THRESHOLD},
            "admin": None,
            **way.settings,
        }


def _blocks(conversations: float) -> int:
    return 1 + int(conversations * MEAN_CONVERSATION / _BLOCK)


SCENARIOS = {
    "A": Scenario("D under pressure: KV for 8 conversations, 24 active", 48, 8, (Phase("all", 180.0, 24),)),
    "B": Scenario(
        "P under pressure: KV for 8 conversations; 24 active, then 4, then 24 again",
        8,
        64,
        (Phase("small", 180.0, 24), Phase("eased", 300.0, 4), Phase("small again", 180.0, 24)),
    ),
    "C": Scenario("calm: room for all 12 conversations on both", 64, 64, (Phase("all", 180.0, 12),)),
}
