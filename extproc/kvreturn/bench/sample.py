"""What one turn took. The names are those of vLLM's multi-turn benchmark, so its readers' tools take these as well."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

LegName = Literal["off", "on"]
LEGS: tuple[LegName, LegName] = ("off", "on")


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn that was answered.

    Attributes:
        ttft_ms: from sending the request to the first piece of the answer; without streams, to its end.
        tpot_ms: time per token behind the first one; 0 if there is none.
        latency_ms: from sending the request to the answer's end.
        start_time_ms: when it was sent, from the run's begin.
        input_num_turns: messages in the request.
        input_num_tokens: of its prompt, as the node counts them.
        output_num_tokens: of its answer, likewise.
        output_num_chunks: pieces of the answer behind the first one.
        output_num_first_chunk_tokens: None: the node does not tell, and there is no tokenizer here.
        approx_cached_percent: share of the prompt that the turn before had, with its answer.
        conversation_id: the conversation's name.
        client_id: number of the client that sent it.
        leg: with which reuse.
        round: number of the round, from 0.
        turn: number of the request in its conversation, from 0.
        text: the answer, to compare.
    """

    ttft_ms: float
    tpot_ms: float
    latency_ms: float
    start_time_ms: float
    input_num_turns: int
    input_num_tokens: int
    output_num_tokens: int
    output_num_chunks: int
    output_num_first_chunk_tokens: None
    approx_cached_percent: float
    conversation_id: str
    client_id: int
    leg: LegName
    round: int
    turn: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """All but the answer's text."""
        return {name: value for name, value in asdict(self).items() if name != "text"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A turn that was not answered; its conversation ends with it.

    Attributes:
        why: the node's words, or what broke.
    """

    leg: LegName
    round: int
    turn: int
    conversation_id: str
    why: str
