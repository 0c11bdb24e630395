"""What a read saves and costs, in a model of a few rates."""

from dataclasses import dataclass

# Medium data-centre GPU, 8B model, 100 Gbit/s: the rates of the simulated nodes (kvreturn.sim.config.Timing), in which
# nothing is imported here: that takes the whole simulation along.
PREFILL_RATE = 8_000.0
TRANSFER_RATE = 10e9
BYTES_PER_TOKEN = 131_072


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast things are, on nodes that do nothing else.

    Attributes:
        prefill: prompt tokens that P computes per second.
        transfer: bytes per second from D to P.
        bytes_per_token: KV of one token.
        overhead: seconds that a read takes whatever its size.
        min_tokens: below so many tokens P reads nothing (`kv_recompute_threshold`).
    """

    prefill: float = PREFILL_RATE
    transfer: float = TRANSFER_RATE
    bytes_per_token: int = BYTES_PER_TOKEN
    overhead: float = 0.005
    min_tokens: int = 64

    @property
    def gain(self) -> float:
        """Seconds saved per token; negative where a link is slower than the computation."""
        return 1 / self.prefill - self.bytes_per_token / self.transfer

    def saving(self, tokens: int) -> float:
        """Seconds by which a turn is shorter if `tokens` can be read: negative for few on a slow link."""
        return tokens * self.gain - self.overhead if tokens >= self.min_tokens else 0.0

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to compute `tokens`."""
        return tokens / self.prefill

    @property
    def break_even(self) -> float | None:
        """Repeated tokens from which on a read is shorter than computing; None if it never is."""
        return max(self.overhead / self.gain, float(self.min_tokens)) if self.gain > 0 else None
