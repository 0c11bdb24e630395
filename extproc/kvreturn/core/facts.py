"""What happened in a turn, and the word for it."""

from dataclasses import dataclass, field

from kvreturn.core import wire
from kvreturn.core.api.base import Usage
from kvreturn.core.outcome import Outcome

_BLOCK = 128  # tokens of vLLM's largest usual block: a prefix cache holds whole blocks
_REPORTED = {
    "local_hit": Outcome.LOCAL_HIT,
    "below_threshold": Outcome.BELOW_THRESHOLD,
    "not_a_continuation": Outcome.NOT_A_CONTINUATION,
    "expired": Outcome.EXPIRED,
    "node_gone": Outcome.NODE_GONE,
    "used": Outcome.NODE_GONE,
    "read_failed": Outcome.READ_FAILED,
}
"""P's reasons (docs/handle-format.md) that have an outcome of their own; all others mean `unproven`."""


@dataclass(slots=True)
class Facts:
    """What happened in a turn, for metrics, traces and logs. Token counts are None where nobody told.

    Attributes:
        outcome: what became of reuse.
        detail: a word more, from P's report or our own checks.
        held: tokens that D held under the handle that was attached.
        proven: how many of them were proven to be the new prompt's prefix.
        read: how many of them P read back.
        local: how many tokens P had in its own prefix cache.
        prefill: usage as P counted it.
        returned: tokens that had gone back to P by an eager return of the turn before; 0 if there was none.
        brought: how many of them P read from D for that.
        unfinished: whether another router had not finished it, as far as the store knows.
        handle_age: seconds from capture to use.
        retries: prefill requests beyond the first.
        fallback: whether D did the turn alone.
        captured: whether this turn left a handle for the next one.
        going: how its KV goes back and by which rule (docs/return.md), `eager(tool_calls)` for example; None if there
            was nothing to choose.
        session: header or member in which the client named its session; None if it did not.
    """

    outcome: Outcome = Outcome.FIRST_TURN
    detail: str | None = None
    held: int | None = None
    proven: int | None = None
    read: int | None = None
    local: int | None = None
    returned: int = 0
    brought: int = 0
    unfinished: bool = False
    prefill: Usage = field(default_factory=Usage)
    handle_age: float | None = None
    retries: int = 0
    fallback: bool = False
    captured: bool = False
    going: str | None = None
    session: str | None = None

    @property
    def computed(self) -> int | None:
        """Tokens of the prompt that P computed, None if it does not tell; its counts need not fit together."""
        if self.prefill.prompt is None or self.local is None:
            return None
        return max(self.prefill.prompt - self.local - (self.read or 0), 0)

    @property
    def saved(self) -> int:
        """Tokens that P did not compute because they came from D, in this turn or eagerly before it.

        What an eager return brought lies behind what P had of the conversation by itself, which saves nothing.
        """
        own = self.returned - self.brought
        return self.read or max(min(self.local or 0, self.returned) - own, 0)

    def grade(self) -> None:
        """P answered a request whose handle was proven beforehand, or trusted."""
        self.outcome = Outcome.HIT if (self.proven or 0) >= (self.held or 0) else Outcome.PARTIAL_HIT

    def grade_returned(self, prompt: int, *, moved: bool) -> None:
        """P answered a turn whose predecessor's tokens had gone back to it.

        Args:
            prompt: tokens of the predecessor's prompt.
            moved: whether another P answered than the one that has them.
        """
        if moved:
            self.outcome, self.detail, self.brought = Outcome.NODE_GONE, "prefill_node", 0
        elif self.unfinished and (self.local or 0) + _BLOCK < self.returned:
            self.outcome, self.detail = Outcome.RETURN_FAILED, "unfinished"  # which tells nothing of P's cache
        elif self.local is None:
            self.outcome = Outcome.RETURNED
        elif self.local + _BLOCK >= self.returned:
            self.outcome = Outcome.HIT
        elif self.local + _BLOCK >= prompt and self.local:
            self.outcome = Outcome.PARTIAL_HIT  # up to where the template changed the answer, or the client did
        else:
            self.outcome, self.detail = Outcome.EVICTED, None if self.local else "all"

    def kept(self, prompt: int) -> bool | None:
        """Whether P still had its predecessor's prompt, where that went the lazy way. None if nobody can tell.

        Args:
            prompt: tokens of the predecessor's prompt. P's cache can have no more of them than is the same in this one.
        """
        if self.local is None or not self.proven or not prompt:
            return None
        return self.local + _BLOCK >= min(prompt, self.proven)

    def grade_report(self, report: wire.Report | None) -> None:
        """P answered a request with a sealed handle: what came of it is in its report."""
        if report is None:
            self.outcome, self.detail = Outcome.UNPROVEN, "no_report"
            return
        self.proven, self.read, self.detail = report.proven, report.read, report.reason
        if report.read:
            self.grade()
        else:
            self.outcome = _REPORTED.get(report.reason or "", Outcome.UNPROVEN)
