"""What P made of an eager return."""

from kvreturn.core.api.completions import Completions
from kvreturn.core.ports import Failure, Reply
from kvreturn.core.prefill import PrefillAnswer, read_prefill
from kvreturn.core.returning import Form

ARRIVED = frozenset({"returned", "local", "computed"})
"""Results after which P has the tokens: it read what it had not; it had nearly all; it computed what it had not."""
_OK = 200


def read_return(form: Form, reply: Reply, node: str, held: int) -> tuple[str, int]:
    """What P made of a return, in one word, and how many tokens it read for it.

    Args:
        form: in which it was sent.
        reply: P's.
        node: address of the P that was to get it.
        held: tokens that D holds. A stock P does not tell how many of them it read.
    """
    if reply.failure is Failure.TIMEOUT:
        return "timeout", 0
    if reply.failure:
        return "unreachable", 0
    if reply.status != _OK:
        return "refused", 0
    if reply.node != node:
        return "moved", 0
    if form is not Form.SEALED:
        return "returned", held
    answer = read_prefill(reply, Completions())
    report = answer.report if isinstance(answer, PrefillAnswer) else None
    if report and report.read:
        return "returned", report.read
    return "local" if report and report.reason in {"local_hit", "below_threshold"} else "computed", 0
