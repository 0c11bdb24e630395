"""Which session a client says that a request belongs to, by the headers and members that real clients use for it.

An id narrows and explains: among equal conversations that of the same session is preferred, what is new in a session
goes to the nodes that it used last, and the log tells a lost conversation from a new one. It never stands for the
proof, and it is kept as a keyed hash only. Neither a person (`user`, `safety_identifier`, `metadata.user_id` of most
clients) nor a credential is a session.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

_LONGEST = 512  # bytes of an id; longer ones are none
_LARGEST = 64 * 1024  # bytes of a member that is parsed for an id
_SESSION = "session_id"
# Claude Code up to 2.1.77; later versions send JSON, or an object, with `session_id`.
_CLAUDE = re.compile(r"user_[^_]*_account_.*_session_([0-9A-Za-z-]+)")


@dataclass(frozen=True, slots=True)
class Session:
    """An id that the client sent.

    Attributes:
        source: header or member that it came from, one of a few; fit for logs.
        id: what the client wrote; not fit for logs.
    """

    source: str
    id: str


def find_session(headers: Mapping[str, str], body: ObjectText, own: str | None = None) -> Session | None:
    """The session of a request, from the first place that has a usable id.

    Args:
        headers: of the request, by lower-case name.
        body: of the request, whichever API it is for.
        own: a header to look at before all others.
    """
    for source, value in _places(headers, body, own):
        if isinstance(value, str) and value.isprintable() and 0 < len(value.encode(errors="replace")) <= _LONGEST:
            return Session(source, value)
    return None


def _places(headers: Mapping[str, str], body: ObjectText, own: str | None) -> Iterator[tuple[str, Any]]:
    """All places, the ones that mean one conversation for sure before those that clients use for more or less."""
    if own:
        yield own, headers.get(own.lower())
    yield "x-claude-code-session-id", headers.get("x-claude-code-session-id")
    metadata = _object(body, "metadata")
    yield "metadata.user_id", _claude(metadata.get("user_id"))
    for name in ("session-id", "session_id"):  # Codex from 0.131 on, and before; sub-agents differ in the thread only
        if name in headers:
            yield name, " ".join(headers[h] for h in (name, "thread-id") if h in headers)
    for name in _HEADERS:
        yield name, headers.get(name)
    for name in ("litellm_session_id", _SESSION, "conversation_id"):
        yield name, _scalar(body, name)
    for name in (_SESSION, "conversation_id"):
        yield f"metadata.{name}", metadata.get(name)
    yield "litellm_metadata.session_id", _object(body, "litellm_metadata").get(_SESSION)
    yield "conversation", _scalar(body, "conversation") or _object(body, "conversation").get("id")
    yield "prompt_cache_key", _scalar(body, "prompt_cache_key")


_HEADERS = (
    "x-session-affinity",  # OpenCode
    "x-opencode-session",
    "x-litellm-session-id",
    "x-session-id",  # also vLLM's own
    "x-conversation-id",
    "helicone-session-id",
)


def _claude(value: Any) -> Any:  # noqa: ANN401 - JSON
    """The session in Anthropic's `metadata.user_id`; None where it is but a person."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = loads(value.encode(errors="replace"))
        except JSONTextError:
            return None
    if isinstance(value, Mapping):
        return value.get(_SESSION)
    match = _CLAUDE.fullmatch(value) if isinstance(value, str) and len(value) <= _LONGEST else None
    return match and match[1]


def _scalar(body: ObjectText, name: str) -> Any:  # noqa: ANN401 - JSON
    """A member's value if it is a text of bearable length."""
    raw = body.get(name)
    return _parsed(raw) if raw is not None and raw[:1] == b'"' else None


def _object(body: ObjectText, name: str) -> Mapping[str, Any]:
    """A member's value if it is an object of bearable length, else an empty one."""
    raw = body.get(name)
    value = _parsed(raw) if raw is not None and raw[:1] == b"{" else None
    return value if isinstance(value, Mapping) else {}


def _parsed(raw: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return loads(raw) if len(raw) <= _LARGEST else None
    except JSONTextError:
        return None
