"""What a request is to us: a turn, JSON that must not bring transfer parameters, or none of our business."""

import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from kvreturn.core.api import API, APIS, Responses
from kvreturn.core.api.base import error_body
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.ports import Forward, Refuse
from kvreturn.core.scrub import may_hold_params, scrub_body

_BY_PATH = {api.path: api for api in APIS}
_STORED = re.compile(rf"{re.escape(Responses.path)}/([^/]+)(?:/[^/]*)*")
_JSON = re.compile(r"application/(?:[^\s;,/]+\+)?json\b", re.IGNORECASE)


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
    return bool(_JSON.match(headers.get("content-type") or "application/json"))


def refused_encoding(headers: Mapping[str, str], error: Callable[[str, str, int], bytes]) -> Refuse | None:
    """The refusal of a body that is compressed, in the shape that `error` gives it; None for one that is not.

    We could not look into it. vLLM's server takes none either, but a proxy on the way to it may unpack one, and what a
    client hid in there with it.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in {"", "identity"}:
        return None
    text = f"kvreturn: a body with content-encoding {encoding[:40]} cannot be read; send it without"
    body = error(text, "UnsupportedMediaType", 415)
    return Refuse(415, body, headers={"accept-encoding": "identity"})  # RFC 9110, 15.5.16


def scrubbed(body: bytes) -> Forward | Refuse:
    """What becomes of JSON that is no turn of ours: it goes on without transfer parameters."""
    if not may_hold_params(body):
        return Forward(body)
    try:
        return Forward(scrub_body(ObjectText(body)).text)
    except JSONTextError as e:
        return Refuse(400, error_body(f"kvreturn: {e}", "BadRequestError", 400))
