"""Takes the handle out of D's response as it passes, and collects what the client sees of the answer."""

from collections.abc import Callable
from typing import Protocol

from kvreturn.core.api.base import Answer
from kvreturn.core.handle import PARAMS
from kvreturn.core.ids import Ids, TokenIds, take_ids
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads
from kvreturn.core.sse import Event, SSEDecoder, event_data, event_end, split_events
from kvreturn.core.strip import MemberStripper

# Transfer parameters of the KV cache and of the encoder cache: both name nodes, neither is a client's business.
HIDDEN = (PARAMS, "ec_transfer_params")
_NEEDLES = tuple(b'"' + name.encode() + b'"' for name in HIDDEN)
_NEEDLE = b'_transfer_params"'  # ends all of them: one look tells of nearly every event that it has none
_NESTED = ("response", "message")  # events of /v1/responses and /v1/messages have the whole object below these
_FOLD = 1 << 16  # bytes of events that are kept before they are parsed in one go
_IDENTITY = {"id", "object", "created", "model", "choices", "system_fingerprint", "service_tier"}


class Capture(Protocol):
    """One response on its way to the client. What `decode` and `flush` return goes on at once.

    Attributes:
        handle: the raw `kv_transfer_params` object, once it has passed.
        oversize: whether something was too large to parse; its handle, if it had one, is gone.
        failed: what went wrong inside, None if nothing did. The response goes on, without its handle.
        ids: token ids of prompt and answer, where they were asked for on our own behalf; they do not go on.
    """

    handle: bytes | None
    ids: TokenIds | None
    oversize: bool
    failed: Exception | None

    def decode(self, data: bytes) -> bytes:
        """Take bytes of the response, return what goes on."""

    def flush(self) -> bytes:
        """End of the response. Returns the rest; the answer is then up to date."""

    def collect(self) -> None:
        """Bring the answer up to what has passed."""


def open_capture(
    content_type: str,
    answer: Answer,
    *,
    event_bytes: int,
    response_bytes: int,
    ids: Ids | None = None,
) -> Capture:
    """The capture for a response of this `content-type`.

    Args:
        content_type: value of the header, lower case.
        answer: collects the answer.
        event_bytes: limit of `StreamCapture`.
        response_bytes: limit of `BodyCapture`.
        ids: as for `BodyCapture`.
    """
    if content_type.startswith("text/event-stream"):
        return StreamCapture(answer, event_bytes)
    return BodyCapture(answer, response_bytes, ids=ids)


class StreamCapture:
    """A response of server-sent events. Every event is passed on the moment it is complete.

    Args:
        answer: collects the answer.
        limit: bytes up to which an event is parsed; a larger one goes on as it comes, without its handle.
    """

    def __init__(self, answer: Answer, limit: int) -> None:
        self.handle: bytes | None = None
        self.ids: TokenIds | None = None
        self.oversize = False
        self.failed: Exception | None = None
        self._answer = answer
        self._limit = limit
        self._decoder = SSEDecoder()
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._dropped = False  # the last event was; more of its blank lines may follow
        self._stripper: MemberStripper | None = None  # while an event over the limit passes, or after a failure
        self._last = b""  # the last bytes that went through the stripper

    def decode(self, data: bytes) -> bytes:
        """See `Capture.decode`."""
        if self._stripper:
            return self._strip(data)
        out = self._events(self._decoder.decode(data))
        if self._decoder.pending > self._limit:
            self.oversize = True
            self._stripper = MemberStripper(HIDDEN, lines=True)
            out += self._strip(b"")
        return out

    def flush(self) -> bytes:
        """See `Capture.flush`."""
        out = self._strip(b"") if self._stripper else self._events(self._decoder.flush())
        if self._stripper:
            out += self._stripper.flush()
        self.collect()
        return out

    def collect(self) -> None:
        """See `Capture.collect`."""
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        try:
            for text in unread:
                for data in event_data(text):
                    _read(self._answer, data, stream=True)
        except Exception as e:  # noqa: BLE001 - as in `_events`
            self._fail(e)

    def _events(self, text: bytes) -> bytes:
        if not text:
            return text
        self._unread.append(text)
        self._unread_bytes += len(text)
        if self._unread_bytes > _FOLD:
            self.collect()
        try:
            if not self.failed:
                return self._rewritten(text)
        except Exception as e:  # noqa: BLE001 - whatever it is, the client's stream goes on, without the handle
            self._fail(e)
        return self._strip(text + self._decoder.flush())

    def _rewritten(self, text: bytes) -> bytes:
        if not self._dropped and _NEEDLE not in text:
            return text
        return b"".join([self._event(event) for event in split_events(text)])

    def _event(self, event: Event) -> bytes:
        if self._dropped and not event.raw.strip(b"\r\n"):
            return b""  # clients take a blank line too many for an empty event (field report 38)
        self._dropped = False
        if event.data is None:  # no event, but perhaps JSON that goes by the wrong name
            return _strip_text(event.raw) if event.raw.lstrip().startswith(b"{") else event.raw
        if not any(needle in event.data for needle in _NEEDLES):
            return event.raw
        try:
            stripped, handle = strip_body(event.data)
        except JSONTextError:
            return _strip_text(event.raw, lines=True)
        self.handle = handle or self.handle
        if stripped == event.data:
            return event.raw
        # An event that only brought the handle would never have been sent without it, and clients read choices[0].
        self._dropped = _says_nothing(stripped)
        return b"" if self._dropped else event.with_data(stripped)

    def _fail(self, error: Exception) -> None:
        self.failed, self.handle = error, None
        self._unread.clear()
        self._stripper = self._stripper or MemberStripper(HIDDEN, lines=True)

    def _strip(self, data: bytes) -> bytes:
        assert self._stripper
        data = self._decoder.flush() + data  # what was held back when it began
        if self.failed:
            return self._stripper.decode(data)
        end = event_end(self._last, data)
        if end is None:
            self._last = (self._last + data)[-3:]
            return self._stripper.decode(data)
        out = self._stripper.decode(data[:end]) + self._stripper.flush()
        self._stripper, self._last = None, b""
        return out + self.decode(data[end:])


class BodyCapture:
    """A JSON body. It is held until it is whole, which a body of one piece always is.

    Args:
        answer: collects the answer.
        limit: bytes up to which the body is parsed; a larger one goes on as it comes, without its handle.
        ids: whether the answer brings all token ids, and whether the client may see them.
        rewrite: makes of the whole body, which need not be JSON, what goes on; None to take out what is hidden.
    """

    def __init__(
        self,
        answer: Answer,
        limit: int,
        *,
        ids: Ids | None = None,
        rewrite: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.handle: bytes | None = None
        self.ids: TokenIds | None = None
        self.oversize = False
        self.failed: Exception | None = None
        self._answer = answer
        self._limit = limit
        self._ids = ids
        self._rewrite = rewrite
        self._body: bytearray | None = bytearray()
        self._begun = False
        self._open = 0  # braces, those in strings counted too
        self._retry_at = 0  # length of the body at which it is tried again, whatever the braces say
        self._stripper: MemberStripper | None = None

    def decode(self, data: bytes) -> bytes:
        """See `Capture.decode`."""
        if self._stripper:
            return self._stripper.decode(data)
        if self._body is None:  # it was whole, and there is more
            self._stripper = MemberStripper(HIDDEN, lines=True)
            return self._stripper.decode(data)
        self._body += data
        if not self._begun:
            first = self._body.lstrip(b" \t\r\n")[:1]
            if first and first != b"{" and self._rewrite is None:
                # No JSON object. But it may be events, whatever their headers say.
                self._stripper = MemberStripper(HIDDEN, lines=True)
                return self._stripper.decode(self._release())
            self._begun = bool(first)
        if len(self._body) > self._limit:
            self.oversize = True
            self._stripper = MemberStripper(HIDDEN)
            return self._stripper.decode(self._release())
        # Trailers may end a response, and then it is too late for bytes: a body goes on as soon as it is whole.
        self._open += data.count(b"{") - data.count(b"}")
        if data.rstrip().endswith(b"}") and (self._open == 0 or len(self._body) >= self._retry_at):
            return self._whole() or b""
        return b""

    def flush(self) -> bytes:
        """See `Capture.flush`."""
        if self._stripper:
            return self._stripper.flush()
        whole = self._whole() if self._body else b""
        if whole is not None:
            return whole
        body = self._release()
        return self._rewrite(body) if self._rewrite else _strip_text(body)

    def collect(self) -> None:
        """See `Capture.collect`. Nothing to do: the body is read when it is whole."""

    def _release(self) -> bytes:
        body = bytes(self._body or b"")
        self._body = None
        return body

    def _whole(self) -> bytes | None:
        body = bytes(self._body or b"")
        try:
            stripped, self.handle = strip_body(body)
            if self._ids:
                without, self.ids = take_ids(stripped)
                stripped = without if self._ids == "hidden" else stripped
            _read(self._answer, body, stream=False)
        except JSONTextError:
            self._retry_at = 2 * len(body)
            return None  # not yet
        except Exception as e:  # noqa: BLE001 - whatever it is, the client's answer goes on, without the handle
            self.failed = e
            self.handle = self.ids = None
            stripped = _strip_text(body)
        self._body = None
        return self._rewrite(body) if self._rewrite else stripped


def strip_body(text: bytes) -> tuple[bytes, bytes | None]:
    """Take the hidden members out of a JSON object, and out of its members `response` and `message`.

    Returns:
        The text without them; and the raw `kv_transfer_params` object, None if there was none.

    Raises:
        JSONTextError: no JSON object.
    """
    body = ObjectText(text)
    handle = _as_object(body.get(PARAMS))
    put = {}
    for name in _NESTED:
        nested = _as_object(body.get(name))
        if nested is not None and any(needle in nested for needle in _NEEDLES):
            put[name], inner = strip_body(nested)
            handle = handle or inner
    return body.edit(drop=HIDDEN, put=put), handle


def _strip_text(text: bytes, *, lines: bool = False) -> bytes:
    """The same for text that may be no JSON, or not all of it."""
    stripper = MemberStripper(HIDDEN, lines=lines)
    return stripper.decode(text) + stripper.flush()


def _as_object(raw: bytes | None) -> bytes | None:
    return raw if raw is not None and raw[:1] == b"{" else None


def _says_nothing(text: bytes) -> bool:
    obj = loads(text)
    return not obj.get("choices") and not any(v for k, v in obj.items() if k not in _IDENTITY)


def _read(answer: Answer, data: bytes, *, stream: bool) -> None:
    try:
        obj = loads(data)
    except JSONTextError:
        return  # `[DONE]`, or an event that went on as it was
    if isinstance(obj, dict):
        answer.read(obj, stream=stream)
