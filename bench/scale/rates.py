"""How fast a node is: a 32B model on 8 H200, from what vLLM's blog published of one prefill and one decode node.

Source: S. Nadampalli, "Improve TTFT for Multi-Turn Agentic Workloads with Bi-Directional KV Transfer in vLLM", vLLM
blog, 12 October 2026: Qwen3-32B in bf16, tensor parallel over 8 GPUs (AWS p5en.48xlarge), EFA, prefix cache of P off.
The load is that of its script `run_multiturn_sweep.sh`, see `published.py`.

Three rates are fitted, each to a figure of the *prefill duration* (the P leg as the proxy saw it):

- off, 2k and 24k tokens (153 and 744 ms): a line through both gives the fixed cost and the prefill rate.
- on, 24k (414 ms): what is left after the fixed cost and the new tokens is the read, which gives the effective
  transfer rate. It is 25 GB/s, though the wire took but 130 ms of it: at 16 tokens a block a read of 25,000 tokens is
  hundreds of thousands of small descriptors.

All TTFTs, and the prefill duration for 2k with read-back on, are predictions.
"""

from dataclasses import dataclass

from kvreturn.sim import Timing
from scale.memory import BLOCK

_LAYERS, _KV_HEADS, _HEAD = 64, 8, 128  # Qwen3-32B's config.json
BYTES_PER_TOKEN = _LAYERS * _KV_HEADS * _HEAD * 2 * 2  # K and V, 2 bytes each: 262,144


@dataclass(frozen=True, slots=True)
class Published:
    """Milliseconds for one prompt length.

    Attributes:
        prefix: tokens of each conversation's first prompt, without its question.
        ttft_off: time to first token without read-back.
        ttft_on: with it.
        prefill_off: P leg without it.
        prefill_on: with it.
    """

    prefix: int
    ttft_off: float
    ttft_on: float
    prefill_off: float
    prefill_on: float


SHORT, LONG = Published(2_000, 158, 122, 153, 128), Published(24_000, 778, 460, 744, 414)
TURNS, QUESTION, ANSWER = 5, 150, 300  # the script's NUM_TURNS counts both sides' messages: 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a pair.

    Attributes:
        prefill: of P.
        decode: of D.
        front: seconds of a P leg in which its engine is free for others: HTTP, tokenizing, scheduling.
        room: tokens of KV on each node.
    """

    prefill: Timing
    decode: Timing
    front: float
    room: int


def fitted() -> Rates:
    """See above."""
    grown = (ANSWER + QUESTION) * (TURNS - 1) / 2  # on average over the turns
    shortest, longest = (p.prefix + QUESTION + grown for p in (SHORT, LONG))
    rate = (longest - shortest) / (LONG.prefill_off - SHORT.prefill_off) * 1e3
    fixed = SHORT.prefill_off / 1e3 - shortest / rate
    first = (LONG.prefix + QUESTION) / rate
    warm = (LONG.prefill_on / 1e3 - fixed - first / TURNS) / (1 - 1 / TURNS)  # a later turn beyond the fixed cost
    held = LONG.prefix + QUESTION + ANSWER + (ANSWER + QUESTION) * (TURNS - 2) / 2
    transfer = held * BYTES_PER_TOKEN / (warm - (QUESTION + 1) / rate)
    engine = _ENGINE_STEP
    return Rates(
        Timing(rate, _STREAM, transfer, BYTES_PER_TOKEN, overhead=engine),
        Timing(rate, _STREAM, transfer, BYTES_PER_TOKEN),
        front=fixed - engine,
        room=_ROOM // BLOCK * BLOCK,
    )


_ENGINE_STEP = 0.010
"""Seconds of the fixed cost that keep the engine from other prompts: a step of 64 layers on 8 GPUs. Not published."""

_STREAM = 80.0
"""Tokens per second of one stream. Llama-3.3-70B on the same machines took 21.9 ms per token (vllm-project/vllm#32553);
half the parameters, a good half of the time."""

_ROOM = int((8 * 141e9 * 0.9 - 65.5e9 - 8 * 4e9) / BYTES_PER_TOKEN)
"""Tokens: 90 % of eight H200, less 65.5 GB of weights and 4 GB per GPU for activations: 3.5 million."""
