"""Bodies that are forms: vLLM's audio endpoints take `vllm_xargs` as JSON in a field."""

import json
from urllib.parse import quote_plus

import pytest

from support.extproc import ALL_MODES, Modes, Request, Response
from support.harness import harness

MULTIPART = "multipart/form-data; boundary=x"
URLENCODED = "application/x-www-form-urlencoded"
AUDIO = "/v1/audio/transcriptions"


def form(value: bytes, name: bytes = b"vllm_xargs") -> bytes:
    return b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n--x--\r\n' % (name, value)


HIDING = [
    pytest.param(MULTIPART, form(b'{"kv_transfer_params": "evil"}'), id="plain"),
    pytest.param(MULTIPART, form(b'{"ec_transfer_params": "evil"}'), id="encoder"),
    pytest.param(MULTIPART, form(b'{"kv\\u005ftransfer\\u005fparams": "evil"}'), id="escaped"),
    pytest.param(MULTIPART, form(b'{"kv_\\u0074ransfer_param\\u0073": "evil"}'), id="escaped-letters"),
    pytest.param(MULTIPART, form(b'{"a":1}', b"x") + form(b'{"kv_transfer_params": 1}'), id="second-field"),
    pytest.param(MULTIPART, form(b'{"kv_transfer_params": 1}', b"v\\llm_xargs"), id="whatever-its-name"),
    pytest.param(f"{MULTIPART}; charset=utf-7", form(b"+AHs-", b"vllm+AF8-xargs"), id="utf-7"),
    pytest.param(f'{MULTIPART}; charset="UTF-16"', "kv_transfer_params".encode("utf-16"), id="utf-16"),
    pytest.param(f"{MULTIPART}; charset=utf-8; charset=utf-7", form(b"x"), id="two-charsets"),
    pytest.param(URLENCODED, b"vllm_xargs=" + quote_plus('{"kv_transfer_params":1}').encode(), id="urlencoded"),
    pytest.param(URLENCODED, b"vllm_xargs=%7B%22kv%5Ftransfer%5Fpar%61ms%22%3A1%7D", id="urlencoded-letters"),
    pytest.param(URLENCODED, b"vllm_xargs=%7B%22kv%5Cu005ftransfer_params%22%3A1%7D", id="urlencoded-escapes"),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("content_type", "body"), HIDING)
async def test_fr85_a_form_that_may_hold_transfer_parameters_is_refused(
    content_type: str, body: bytes, modes: Modes
) -> None:
    router = harness()
    envoy = await router.play(Request(AUDIO, [body], headers={"content-type": content_type}), Response(), modes)
    assert (envoy.client.status, envoy.upstream.body) == (400, b"")
    assert json.loads(envoy.client.body)["error"]["message"].startswith("kvreturn: a form must ")
    assert router.metric("requests_refused_total", why="form") == 1


PLAIN = [
    (MULTIPART, form(b'{"language": "\xc3\xa9", "top": 3, "note": "\\u00e9\\n"}') + form(b"\x00\\u\xff" * 99, b"file")),
    (f"{MULTIPART}; charset=UTF-8", form(b"plain words", b"prompt")),
    (URLENCODED, b"a=b%20c&d=%5Cn"),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("content_type", "body"), PLAIN)
async def test_any_other_form_passes_byte_for_byte(content_type: str, body: bytes, modes: Modes) -> None:
    request = Request(AUDIO, [body[:40], body[40:]], headers={"content-type": content_type})
    envoy = await harness().play(request, Response([b"{}"]), modes)
    assert (envoy.client.status, envoy.upstream.body) == (200, body)
