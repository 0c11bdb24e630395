"""The stand-in for Envoy's Lua API, on which tests/lanes stands, does as Envoy does: the same scripts see the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from support.asked import Asked, Fields
from support.envoy import Gateway, Json, client_manager, gateway, unused_address
from support.lanes import (
    BROKEN,
    CLOSED,
    LATE,
    UNHEALTHY,
    UNREACHABLE,
    Answer,
    Call,
    Exchange,
    header_map,
    ours,
    read_map,
    worker,
)

_PRELUDE = """
local out
local function say(what, ...)
  local values = { what }
  for i = 1, select("#", ...) do
    values[#values + 1] = tostring((select(i, ...)))
  end
  out[#out + 1] = table.concat(values, " ")
end
-- What a function gives, or how it fails.
local function try(what, f, ...)
  local function tell(fine, ...)
    if fine then
      say(what, ...)
    else
      say(what, "fails:", (string.gsub(tostring((...)), "^%[string.-%]:%d+: ", "")))
    end
  end
  tell(pcall(f, ...))
end
local CALL = { [":method"] = "POST", [":path"] = "/empty", [":authority"] = "a" }
local probes = {}
function envoy_on_request(handle)
  out = {}
  local headers = handle:headers()
  local probe = probes[headers:get("x-probe")]
  if not probe then
    return
  end
  probe(handle, headers)
  handle:respond({ [":status"] = "200" }, table.concat(out, "\\n"))
end
"""
_ANSWER = """
function envoy_on_response(handle)
  local headers, last = handle:headers(), nil
  if not headers:get("x-streamed") then
    return
  end
  out = {}
  try("change", headers.replace, headers, "x-streamed", "changed")
  for chunk in handle:bodyChunks() do
    try("old headers", headers.get, headers, ":status")
    try("late change", function() handle:headers():replace("x-streamed", "late") end)
    say("status", handle:headers():get(":status"))
    try("old chunk", function() return last and last:length() end)
    say("chunk", chunk:length(), chunk:getBytes(0, chunk:length()))
    if chunk:length() == 2 then
      chunk:setBytes("longer")
    end
    last = chunk
  end
  try("last chunk", last.length, last)
  try("trailers", function() return select("#", handle:trailers()) end)
  last:setBytes(table.concat(out, "\\n"))
end
"""
LATE_BODY = "a body that is asked for too late"
_PROBES = {
    "headers": """
  try("get", headers.get, headers, "x-p-twice")
  try("get by another case", headers.get, headers, "X-P-Once")
  try("get none", headers.get, headers, "x-p-none")
  try("get an empty one", headers.get, headers, "x-p-empty")
  for name, value in pairs(headers) do
    if string.find(name, "^x%-p") then say("pair", name, value) end
  end
  try("replace several", headers.replace, headers, "x-p-twice", "3")
  try("replace none", headers.replace, headers, "x-p-new", "é")
  try("remove", headers.remove, headers, "x-p-once")
  try("remove none", headers.remove, headers, "x-p-none")
  for name, value in pairs(handle:headers()) do
    if string.find(name, "^x%-p") then say("pair", name, value) end
  end
  try("iterate twice", function() for _ in pairs(headers) do for _ in pairs(headers) do end end end)
  try("change while iterating", headers.remove, headers, "x-p-new")
""",
    "body": """
  local info, body = handle:streamInfo(), handle:body()
  say("body", body ~= nil)
  try("old headers", headers.get, headers, "x-p-once")
  try("old info", info.routeName, info)
  if body then
    try("length", body.length, body)
    try("bytes", body.getBytes, body, 0, body:length())
    try("too many", body.getBytes, body, 0, body:length() + 1)
    handle:httpCall("up", CALL, "", 1000)
    try("old body", body.length, body)
    try("body again", function() return handle:body():length() end)
    handle:body():setBytes("changed")
    try("new body", function() return handle:body():getBytes(0, 7) end)
    say("length", handle:headers():get("content-length"))
  else
    try("how many values", function() return select("#", handle:body()) end)
  end
""",
    LATE_BODY: """
  handle:httpCall("up", { [":method"] = "POST", [":path"] = "/late", [":authority"] = "a" }, "", 1000)
  try("body", function() return select("#", handle:body()) end)
""",
    "calls": """
  local function call(cluster, path)
    try(cluster .. path, function()
      local of_call = { [":method"] = "POST", [":path"] = path, [":authority"] = "a" }
      local headers, body = handle:httpCall(cluster, of_call, "text", 150)
      return headers[":status"], headers["x-kvreturn-reply"], body
    end)
  end
  call("up", "/echo")
  call("up", "/empty")
  call("up", "/late")
  call("up", "/closed")
  call("up", "/broken")
  call("down", "/")
  call("nobody", "/")
  call("unknown", "/")
  try("no authority", function() handle:httpCall("up", { [":method"] = "POST", [":path"] = "/" }, "", 100) end)
  try("no time", function() handle:httpCall("up", CALL, "", -1) end)
  try("asynchronous", function() return select("#", handle:httpCall("up", CALL, "", 100, true)) end)
""",
    "the rest": """
  local metadata = handle:streamInfo():dynamicMetadata()
  try("no metadata", function() return select("#", metadata:get("kvreturn")) end)
  metadata:set("kvreturn", "a", "b")
  local got = metadata:get("kvreturn")
  metadata:set("kvreturn", "a", "c")
  say("metadata", got.a, metadata:get("kvreturn").a)
  say("route", handle:streamInfo():routeName())
  say("base64", handle:base64Escape("\\255\\0a"), handle:base64Escape("ab"), handle:base64Escape("abc"))
  for _, host in ipairs({ "10.0.0.1:80", "[::1]:80", "node-1:80", "10.0.0.1", "::1", "" }) do
    try("override " .. host, function() handle:setUpstreamOverrideHost(host, false) end)
  end
  try("status", handle.respond, handle, { [":status"] = "600" }, "")
  try("no status", handle.respond, handle, {}, "")
  say("behind an answer", went_on)
  pcall(handle.respond, handle, { [":status"] = "200" }, table.concat(out, "\\n"))
  went_on = true
""",
}
_FIELDS = [("x-p-once", "1"), ("x-p-twice", "1"), ("x-p-twice", "2"), ("x-p-empty", ""), ("x-p-bytes", "\xc3\xa9")]
Body = Sequence[bytes] | None
CASES: list[tuple[str, Body]] = [
    ("headers", None),
    ("body", None),
    ("body", [b"abc"]),
    ("body", [b"ab", b"c", b""]),
    ("body", [b""]),
    (LATE_BODY, None),
    (LATE_BODY, [b"abc"]),
    ("calls", None),
    ("the rest", None),
    ("the rest", None),  # on the same thread
]
_STREAMED = (b"abc", b"de")
_ANSWERS = {"/empty": Answer(), "/late": LATE, "/closed": CLOSED, "/broken": BROKEN}


def script() -> str:
    probes = (f'probes["{name}"] = function(handle, headers)\n{lines}end\n' for name, lines in _PROBES.items())
    return "".join([_PRELUDE, *probes, _ANSWER])


def answer(call: Call) -> Answer | None:
    """What comes of a call, as tests/lanes has it."""
    said = _ANSWERS.get(call.headers[":path"], ours(b"text"))
    return {"up": said, "down": UNREACHABLE, "nobody": UNHEALTHY}.get(call.cluster)


async def up(request: web.Request) -> web.StreamResponse:
    """Answers as the stand-in says that Envoy would tell of it."""
    body = await request.read()
    assert request.transport
    if request.path == "/echo":
        return web.Response(body=body, headers={"x-kvreturn-reply": "1"})
    if request.path == "/streamed":
        streamed = web.StreamResponse(headers={"x-streamed": "1"})
        await streamed.prepare(request)
        for piece in _STREAMED:
            await streamed.write(piece)
            await asyncio.sleep(0.05)
        return streamed
    if request.path == "/late":
        await asyncio.sleep(0.3)
    if request.path == "/closed":
        request.transport.abort()
    if request.path == "/broken":
        response = web.StreamResponse(headers={"content-length": "9"})
        await response.prepare(request)
        await response.write(b"text")
        await asyncio.sleep(0.02)
        request.transport.abort()
        return response
    return web.Response()


@contextlib.asynccontextmanager
async def envoy() -> AsyncIterator[Gateway]:
    """Envoy with this script."""
    server = web.AppRunner(web.Application(), access_log=None, shutdown_timeout=0.1)
    server.app.router.add_route("*", "/{path:.*}", up)
    listen, nobody = unused_address(), unused_address()

    def change(bootstrap: Json) -> None:
        filters = client_manager(bootstrap)["http_filters"]
        lua = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script()},
        }
        filters[:-1] = [{"name": "lua", "typed_config": lua}]
        bootstrap["static_resources"]["clusters"] += [
            _cluster("up", listen), _cluster("down", nobody), _cluster("nobody")
        ]  # fmt: skip

    await server.setup()
    try:
        await web.TCPSite(server, "127.0.0.1", int(listen.split(":")[1])).start()
        async with gateway(unused_address(), [listen], change=change) as there:
            yield there
    finally:
        await server.cleanup()


def _cluster(name: str, *addresses: str) -> Json:
    hosts = [address.split(":") for address in addresses]
    sockets = [{"socket_address": {"address": host, "port_value": int(port)}} for host, port in hosts]
    places = [{"endpoint": {"address": socket}} for socket in sockets]
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": places}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": load}


async def ask(there: Gateway, came: Fields, body: Body) -> bytes:
    """Send the request byte for byte; what the script says."""
    host, port = there.settings.envoy.listen.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    whole = body is not None and len(body) == 1 and body[0]
    framing = [("content-length", str(len(body[0])))] if body and whole else []
    framing += [("transfer-encoding", "chunked")] if body and not whole else []
    fields = [("host", "a"), ("connection", "close"), *came, *framing]
    writer.write(b"POST / HTTP/1.1\r\n" + b"".join(f"{n}: {v}\r\n".encode("latin-1") for n, v in fields) + b"\r\n")
    for piece in body or []:
        writer.write(piece if whole else b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    text = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    writer.close()
    return text


async def test_scripts_see_the_same() -> None:
    thread = worker(script())
    async with envoy() as there:
        for probe, body in CASES:
            came = [("x-probe", probe), *_FIELDS]
            asked = Asked(came, body, answer, slow=probe == LATE_BODY, on=thread)
            assert asked.errors == []
            assert asked.response
            said = [probe, *asked.response[2].decode("latin-1").splitlines()]
            assert said == [probe, *(await ask(there, came, body)).decode("latin-1").splitlines()]
            assert len(said) > 1


async def test_scripts_see_the_same_of_an_answer() -> None:
    async with envoy() as there, there.client.post("/streamed", headers={"x-probe": "none"}) as answer:
        got = (await answer.text()).splitlines()
    thread, headers = worker(script()), header_map([(":status", "200"), ("x-streamed", "1")])
    stream = thread.response(thread, Exchange(None).lua, headers)
    out = b"".join(stream.chunk(stream, piece, piece == b"") for piece in (*_STREAMED, b""))
    assert list(stream.errors.values()) == []
    assert got == out.decode().splitlines()
    assert len(got) > 15
    assert answer.headers["x-streamed"] == dict(read_map(headers))["x-streamed"] == "changed"
