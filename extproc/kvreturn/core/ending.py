"""The end of a turn: what it leaves for the next one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreturn.core.address import host_of
from kvreturn.core.capture import Capture
from kvreturn.core.handle import Handle, HandleError, read_handle
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Put, Record
from kvreturn.core.returning import Job

if TYPE_CHECKING:
    from kvreturn.core.turn import Turn

_TTL_MARGIN = 10.0  # P declines reads within 5 s of D's expiry (vLLM 0.32.0); the rest is for the way there
_SAME = frozenset({"model", "cache_salt"})  # what decides whose blocks those of a prompt are


def leave(turn: "Turn", capture: Capture, decode_node: str | None) -> Put | None:
    """What to store of a turn whose response is complete.

    Args:
        turn: the turn.
        capture: its response.
        decode_node: address of the D that really answered, None if that is not known.
    """
    assert turn.prompt
    assert turn.trail
    node = decode_node or turn.decode_node
    handle = _handle(capture, node)
    if node and handle:
        node = turn.judge.decoded(node, handle.engine)
    reason = Outcome.NO_HANDLE_FROM_DECODE
    if turn.prompt.choices > 1:
        reason = Outcome.MULTIPLE_CHOICES  # a stock D has pinned the blocks of some choice
    elif handle:
        whole = turn.api.extend(turn.trail, turn.body, turn.answer, strict=turn.policy.strict)
        prompt = None if turn.policy.strict else turn.trail.prompt_key()
        named = [k for k in dict.fromkeys([whole.turn_key() if whole else None, prompt]) if k]
        keys = [place for key in named for place in turn.trail.places(key, turn.session_key)]
        record = _record(turn, handle, node)
        job = _job(turn, capture, handle, record)
        if keys and record.ttl > 0 and (job or turn.reads_later):
            turn.facts.captured = True
            return Put(keys, record, job, turn.conversation_key)
        reason = Outcome.UNPROVEN if not keys else Outcome.DISABLED if record.ttl > 0 else Outcome.EXPIRED
    if handle:
        turn.spare.append(_record(turn, handle, node))
    key = turn.trail.prompt_key()
    return Put([key], Record(turn.policy.ttl, None, reason, node, turn.prefill_node)) if key else None


def _handle(capture: Capture, node: str | None) -> Handle | None:
    try:
        return read_handle(capture.handle, host_of(node) if node else None) if capture.handle else None
    except HandleError:
        return None


def _record(turn: "Turn", handle: Handle, node: str | None) -> Record:
    ttl = turn.policy.ttl
    if handle.proof:
        ttl = min(ttl, max(handle.proof.ttl - _TTL_MARGIN, 0.0))
    turns = turn.taken.record.turns + 1 if turn.taken.record else 1
    prompt = turn.facts.prefill.prompt or 0
    return Record(ttl, handle.raw, None, node, turn.prefill_node, prompt=prompt, turns=turns)


def _job(turn: "Turn", capture: Capture, handle: Handle, record: Record) -> Job | None:
    """How this turn's blocks go back to P at once; None if the policy forbids it, or the tokens are not known."""
    if turn.policy.returns == "lazy" or turn.prefill_node is None or handle.tokens < turn.policy.min_tokens:
        return None
    ids: tuple[bytes, Sequence[int]] | None = capture.ids
    if handle.proof and turn.prompt_ids is not None:
        ids = turn.prompt_ids, handle.proof.generated
    if ids is None:
        return None
    body = turn.body
    return Job(
        handle=handle,
        prefill_node=turn.prefill_node,
        engine=turn.engine,
        decode_node=record.decode_node,
        kept=ObjectText(body.without({m.name for m in body.members} - _SAME)).text,
        prompt=ids[0],
        generated=ids[1],
        tenant=turn.tenant,
        secret=turn.policy.secret,
        salt=body.load("cache_salt") or "",
        finish_reason=turn.answer.finish_reasons.get(0),
        gap=turn.taken.age if turn.taken.record else None,
        turns=record.turns,
        lazy=turn.reads_later,
        mode=turn.policy.returns,
        ttl=record.ttl,
    )
