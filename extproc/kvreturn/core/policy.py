"""What applies to the turns of one model."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Policy:
    """What applies to the turns of one model.

    Attributes:
        proof: see `Settings.proof`.
        min_tokens: handles for fewer tokens are not attached.
        timeout: seconds for the whole prefill leg.
        fallback: whether D does the turn alone when prefill failed.
        ttl: seconds for which a handle may be used.
        secret: shared with the nodes; empty where none is configured.
        pass_token_ids: whether P tells D the prompt's token ids.
        returns: see `Settings.return_`.
        history: messages of the longest request.
        salts: whether each tenant gets a `cache_salt` of its own.
    """

    proof: Literal["connector", "router", "trusted", "off"]
    min_tokens: int = 64
    timeout: float = 60.0
    fallback: bool = True
    ttl: float = 450.0
    secret: bytes = b""
    pass_token_ids: bool = True
    returns: Literal["lazy", "eager", "auto"] = "lazy"
    history: int = 50_000
    salts: bool = False

    @property
    def strict(self) -> bool:
        """Whether fingerprints must be equal to the letter, since nothing else is checked."""
        return self.proof == "trusted"

    @property
    def remembers(self) -> bool:
        """Whether turns leave anything for the next one."""
        return self.proof != "off" or self.returns != "lazy"
