"""One generation as the engine sees it."""

from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvreturn.core.wire import Report
from kvreturn.sim.blocks import BlockHasher
from kvreturn.sim.grammar import Manner
from kvreturn.sim.model import image_input
from kvreturn.sim.output import Heard
from kvreturn.sim.template import Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """When to stop; vLLM's members of the same names."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """One choice of one request.

    Attributes:
        prompt: what the model reads.
        manner: how it may answer.
        sampling: when it stops.
        listen: takes every token with two flags: it is a stop token whose text is left out; it is the last one. Says
            whether a stop string was completed.
        params: the request's `kv_transfer_params`, a copy of its own.
        adapter: LoRA adapter, empty for the base model.
        salt: the request's `cache_salt`, or empty.
        choice: index of the choice.
        choices: how many the request has (`n`).
        priority: counts where the node schedules by priority; lower is earlier.
    """

    prompt: Prompt
    manner: Manner
    sampling: Sampling
    listen: Callable[[int, bool, bool], Heard]
    params: dict[str, Any] | None = None
    adapter: str = ""
    salt: str = ""
    choice: int = 0
    choices: int = 1
    priority: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's state of a job; equal to itself only.

    Attributes:
        job: what was asked.
        request_id: the engine's own id; goes into handles.
        hasher: hashes of full blocks.
        tokens: prompt and generated tokens.
        blocks: blocks that the sequence owns, in order.
        local: prompt tokens found in the node's prefix cache.
        external: prompt tokens loaded from a peer.
        from_peer: it arrived with a peer's handle to load the prompt from (vLLM's `do_remote_prefill`).
        reported_cached: what the peer says about its own prefix cache hit, shown instead of ours.
        report: what the kvreturn connector did on P.
        rank: its place among those that wait for blocks, lower is earlier.
        place: set while it waits for blocks.
    """

    job: Job
    request_id: str
    hasher: BlockHasher
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    external: int = 0
    from_peer: bool = False
    reported_cached: int | None = None
    report: Report | None = None
    rank: tuple[int, int] = (0, 0)
    place: "Future[None] | None" = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.job.prompt.tokens)

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    def inputs(self, start: int) -> list[int]:
        """What the model sees at positions `start`.. : token ids, with images in place of their placeholders."""
        values = self.tokens[start:]
        for position, digest in self.job.prompt.images.items():
            if position >= start:
                values[position - start] = image_input(digest)
        return values

    def cached_tokens(self) -> int:
        """`usage.prompt_tokens_details.cached_tokens`."""
        return self.local + self.external if self.reported_cached is None else self.reported_cached

    def created_tokens(self, block_size: int) -> int:
        """`usage.prompt_tokens_details.created_cache_tokens`: prompt tokens newly put into the prefix cache."""
        full = self.prompt_length - self.prompt_length % block_size
        return max(0, full - self.local - self.external)


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token.

    Attributes:
        job: position of the job in its request.
        sequence: its state.
        token: the id.
        heard: what of the text it completes.
        finish_reason: `stop` or `length` on the last step.
        stop_reason: the stop string or stop token id that ended it.
        params: the handle, on the last step, if there is one.
    """

    job: int
    sequence: Sequence
    token: int
    heard: Heard
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    params: dict[str, Any] | None = None
