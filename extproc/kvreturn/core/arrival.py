"""What P made of an eager return."""

from kvreturn.core.api.completions import Completions
from kvreturn.core.ports import Failure, Reply
from kvreturn.core.prefill import PrefillAnswer, read_prefill
from kvreturn.core.returning import Form

ARRIVED = frozenset({"returned", "computed"})
"""Results after which P has the tokens."""
_OK = 200


def read_return(form: Form, reply: Reply, node: str) -> str:
    """What P made of a return, in one word.

    Args:
        form: in which it was sent.
        reply: P's.
        node: address of the P that was to get it.
    """
    if reply.failure is Failure.TIMEOUT:
        return "timeout"
    if reply.failure:
        return "unreachable"
    if reply.status != _OK:
        return "refused"
    if reply.node != node:
        return "moved"
    if form is not Form.SEALED:
        return "returned"
    answer = read_prefill(reply, Completions())
    report = answer.report if isinstance(answer, PrefillAnswer) else None
    return "returned" if report and (report.read or report.reason == "local_hit") else "computed"
