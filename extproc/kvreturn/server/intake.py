"""What a request is to us: a turn, JSON that must not bring transfer parameters, or none of our business."""

import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote, unquote_to_bytes

from kvreturn.config import Settings
from kvreturn.core.api import API, APIS, Responses
from kvreturn.core.api.base import error_body
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.ports import Forward, Refuse
from kvreturn.core.scrub import may_hold_params, scrub_body

_BY_PATH = {api.path: api for api in APIS}
_STORED = re.compile(rf"{re.escape(Responses.path)}/([^/]+)(?:/[^/]*)*")
# HTTP/2 clients may send white space around a value; on the way to the node it goes (RFC 9112, 5.1).
_FORM = re.compile(r"[ \t]*(?:multipart/form-data|application/x-www-form-urlencoded)", re.IGNORECASE)
_CHARSET = re.compile(r'charset\s*=\s*"?([\w.-]*)', re.IGNORECASE)
_ASCII_BASED = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1"})
# The name of a member of transfer parameters, or a letter or underscore that is written as an escape: nobody does that
# who has nothing to hide, and in the bytes of a file it comes up once in a few terabytes.
_HIDDEN_IN_FORM = re.compile(rb"transfer_params|\\u00[4-7][0-9A-Fa-f]")
# As wide as Python's email.message, by which FastAPI tells.
_JSON = re.compile(r"\s*application/(?:[^;/]*\+)?json\b", re.IGNORECASE)

SETUP = (
    "kvreturn: this ext_proc filter must send headers, request bodies (BUFFERED, STREAMED or FULL_DUPLEX_STREAMED) and "
    "response bodies (STREAMED or FULL_DUPLEX_STREAMED); see `kvreturn envoy-config`"
)
"""What is said where Envoy's filter is set up so that turns cannot be followed."""


def turn_api(headers: Mapping[str, str]) -> API | None:
    """The API of a turn; None if these are headers of something else."""
    if headers.get(":method") != "POST":
        return None
    return _BY_PATH.get(_path(headers))


def stored_response(headers: Mapping[str, str]) -> str | None:
    """The id of the stored response that a request is about, if it is about one."""
    match = _STORED.fullmatch(_path(headers))
    return match and match[1]


def _path(headers: Mapping[str, str]) -> str:
    # vLLM's server decodes paths before it matches them (uvicorn), so an escaped path is the same path.
    return unquote(headers.get(":path", "").partition("?")[0])


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether vLLM's server reads the body as JSON. FastAPI does so too where the type is missing or empty."""
    return bool(_JSON.match(headers.get("content-type", "").strip(" \t") or "application/json"))


def is_form(headers: Mapping[str, str]) -> bool:
    """Whether vLLM's server reads the body as a form, as for audio. One of its fields, `vllm_xargs`, is JSON."""
    return bool(_FORM.match(headers.get("content-type", "")))


def is_read(headers: Mapping[str, str]) -> bool:
    """Whether a request's body is looked at, if it has one."""
    return turn_api(headers) is not None or is_json(headers) or is_form(headers)


def refused(
    headers: Mapping[str, str], settings: Settings, error: Callable[[str, str, int], bytes], *, ours: bool
) -> Refuse | None:
    """The refusal of a request for what its headers are, or lack; None if they are well.

    Args:
        headers: of the request.
        settings: the router's.
        error: gives the refusal its shape.
        ours: whether it is a turn, or about a stored response.
    """
    return (_refused_sender(headers, settings, error) if ours else None) or _refused_encoding(headers, error)


def _refused_sender(
    headers: Mapping[str, str], settings: Settings, error: Callable[[str, str, int], bytes]
) -> Refuse | None:
    limit = settings.limits.header_bytes
    if sum(len(name) + len(value) for name, value in headers.items()) > limit:
        text = f"kvreturn: the request headers are over {limit} bytes (limits.header_bytes)"
        return Refuse(431, error(text, "RequestHeaderFieldsTooLarge", 431), why="headers")
    tenant = settings.tenant_header
    if tenant and not headers.get(tenant.lower()):
        text = f"kvreturn: the request has no {tenant} header, which the auth filter before this router sets"
        return Refuse(403, error(text, "PermissionDenied", 403), why="tenant")
    return None


def _refused_encoding(headers: Mapping[str, str], error: Callable[[str, str, int], bytes]) -> Refuse | None:
    """The refusal of a body that is compressed, in the shape that `error` gives it; None for one that is not.

    We could not look into it. vLLM's server takes none either, but a proxy on the way to it may unpack one, and what a
    client hid in there with it.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in {"", "identity"}:
        return None
    text = f"kvreturn: a body with content-encoding {encoding[:40]} cannot be read; send it without"
    body = error(text, "UnsupportedMediaType", 415)
    return Refuse(415, body, headers={"accept-encoding": "identity"}, why="encoding")  # RFC 9110, 15.5.16


def scrubbed(body: bytes, headers: Mapping[str, str]) -> Forward | Refuse:
    """What becomes of a body that is no turn of ours: it goes on without transfer parameters."""
    if is_form(headers):
        return _form(body, headers["content-type"])
    if not may_hold_params(body):
        return Forward(body)
    try:
        return Forward(scrub_body(ObjectText(body)).text)
    except JSONTextError as e:
        return Refuse(400, error_body(f"kvreturn: {e}", "BadRequestError", 400))


def _form(body: bytes, content_type: str) -> Forward | Refuse:
    """A form as it is, or its refusal: to take something out of it, it would have to be read just as the node does."""
    # vLLM's server decodes fields by this, UTF-7 and UTF-16 too.
    charsets = {c.lower() for c in _CHARSET.findall(content_type)}
    plain = unquote_to_bytes(body) if "urlencoded" in content_type.lower() else body
    if not charsets <= _ASCII_BASED:
        text = "kvreturn: a form must be in UTF-8"
    elif _HIDDEN_IN_FORM.search(plain):
        text = "kvreturn: a form must hold no transfer parameters, nor JSON with escaped letters"
    else:
        return Forward(body)
    return Refuse(400, error_body(text, "BadRequestError", 400), why="form")
