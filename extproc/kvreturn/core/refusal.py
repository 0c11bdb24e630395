"""A node's refusal as the client may see it.

Validation errors may quote the request as Python writes it, cut off somewhere: `... 'input': {'model': 'm', ...,
'kv_transfer_params': {'do_remote_prefill': True, ...`. vLLM 0.32.0 shortens what it quotes; other versions need not.
What the client sent may be shown to it, what we added may not.
"""

import re
from http import HTTPStatus

from kvreturn.core.api.base import API
from kvreturn.core.capture import HIDDEN, strip_body
from kvreturn.core.fingerprint import SALT
from kvreturn.core.jsontext import JSONTextError
from kvreturn.core.strip import MemberStripper

_QUOTE = re.compile(rb"(?:%s)[\\'\": =]{1,8}\{" % b"|".join(name.encode() for name in HIDDEN))
_STEP = re.compile(rb'[{}]|(?<!\\)"')  # a brace, or the end of the JSON string that quotes
_SALT = re.compile(SALT.encode() + rb"[0-9a-f]{1,32}")
_MEMBERS = (b"remote_engine_id", b"remote_block_ids")  # of every handle


def strip_refusal(body: bytes, api: API, status: int) -> bytes:
    """The refusal without transfer parameters, members or quoted ones, and without a `cache_salt` of ours.

    Args:
        body: of the node's answer.
        api: what the client speaks.
        status: of the node's answer.
    """
    try:
        text = strip_body(body)[0]
    except JSONTextError:
        stripper = MemberStripper(HIDDEN, lines=True)
        text = stripper.decode(body) + stripper.flush()
    text = _SALT.sub(b"...", _unquoted(text))
    if not any(name in text for name in _MEMBERS):
        return text
    words = "kvreturn: the node refused the request; what it says is withheld, since it quotes transfer parameters"
    # Not every status has a name: nginx has 499, and overloaded servers answer 529.
    phrase = next((known.phrase for known in HTTPStatus if known == status), "Node Error")
    return api.error(words, phrase.replace(" ", ""), status)


def _unquoted(text: bytes) -> bytes:
    out, at = bytearray(), 0
    for match in _QUOTE.finditer(text):
        if match.end() > at:
            out += text[at : match.end()] + b"..."
            at = _end(text, match.end())
    return bytes(out + text[at:])


def _end(text: bytes, at: int) -> int:
    """Where the object ends that begins before `at`: at its brace, or where its quotation breaks off."""
    depth = 1
    for step in _STEP.finditer(text, at):
        depth += {b"{": 1, b"}": -1}.get(step[0], -depth)
        if not depth:
            return step.start()
    return len(text)
