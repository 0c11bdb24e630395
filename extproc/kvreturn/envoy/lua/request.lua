-- A request: the router hears of it, whole, in one call, and says in one answer what becomes of it.
--
-- `kvreturn envoy-config` writes the constants before this script: ROUTERS, TURNS, the clients' errors, and so on. What
-- the router is sent and what it says is described where it reads and writes it (kvreturn/server/called.py).
--
-- Envoy's contract, as of 1.40:
--  * A script that fails is over, and the request goes on as it came: with what a client may have hidden in it. So all
--    that may fail is called by `pcall`, and if it has failed, the client gets an error.
--  * An answer of Envoy's own to a call (nobody listens, nobody answers) looks like any other: the router's have a
--    header that says so.

local REPLY, HEAD = "x-kvreturn-reply", "x-kvreturn-head"
local UNTAKEN = { "no healthy upstream", "connection failure", "connection timeout", "overflow" } -- nobody has begun with it

local KEEP = 4194304 -- bytes of the buffer for new bodies that are kept for the next one

local BODILESS = { GET = true, HEAD = true, OPTIONS = true }

local last_router = 0

-- LuaJIT's: with strings alone, two more copies of a body of 1 MB would take 0.8 ms.
local ffi, made = require("ffi"), require("string.buffer").new()

local function keep(body, from, to)
  assert(0 <= from and from <= to and to <= #body)
  made:putcdata(ffi.cast("const char *", body) + from, to - from)
end

local function untaken(text)
  for _, words in ipairs(UNTAKEN) do
    if find(text, words, 1, true) then
      return true
    end
  end
  return false
end

-- Which router has taken the request, and what it says; nil and Envoy's status if none has.
local function ask(handle, head, kind, body)
  local status
  for _ = 1, #ROUTERS do
    last_router = last_router % #ROUTERS + 1
    local router = ROUTERS[last_router]
    local about = { [":method"] = "POST", [":path"] = "/kvreturn/request", [":authority"] = "kvreturn" }
    about[HEAD] = SCRIPTS .. " " .. kind .. " " .. handle:base64Escape(head)
    local headers, text = handle:httpCall(REQUESTS .. router, about, body, REQUEST_SECONDS * 1000)
    if headers[REPLY] then
      return router, text
    end
    status = headers[":status"]
    if not untaken(text or "") then
      break
    end
  end
  return nil, status
end

local function head_of(headers)
  local lines = {}
  for name, value in pairs(headers) do
    lines[#lines + 1] = name .. ":" .. value .. "\n"
  end
  return table.concat(lines)
end

-- The client gets one of `bodies`: the first in the shape of OpenAI's APIs, the second in Anthropic's.
local function refuse(handle, status, bodies)
  local path = handle:headers():get(":path") or ""
  local body = sub(path, 1, #ANTHROPIC) == ANTHROPIC and bodies[2] or bodies[1]
  handle:respond({ [":status"] = status, ["content-type"] = "application/json", ["retry-after"] = "1" }, body)
end

local function no_router(handle, status)
  handle:logErr("kvreturn: no router has answered at its `calls` address (" .. tostring(status) .. ")")
  if status == "504" then
    refuse(handle, "504", LATE)
  else
    refuse(handle, "500", GONE)
  end
end

-- Names the node to Envoy as its own override, which asks whether that node is alive; as `override_host` does not.
local function towards(handle, metadata, node)
  if not pcall(handle.setUpstreamOverrideHost, handle, node, false) then
    metadata:set(NAMESPACE, "decode_node", node)
  end
end

-- Does as the router says.
local function apply(handle, router, said, body)
  local stop = find(said, "\n\n", 1, true)
  local rest, headers, metadata = sub(said, stop + 2), handle:headers(), handle:streamInfo():dynamicMetadata()
  local answer, edited, at = nil, false, 1
  made:reset()
  for word, value in string.gmatch(sub(said, 1, stop), "(%l+) ?([^\n]*)\n") do
    local name, text = match(value, "^(:?[^:]*):(.*)$")
    if word == "answer" then
      answer = { [":status"] = value }
    elseif word == "set" and answer then
      answer[name] = text
    elseif word == "set" then
      headers:replace(name, text)
    elseif word == "remove" then
      headers:remove(value)
    elseif word == "meta" and name == "decode_node" then
      towards(handle, metadata, text)
    elseif word == "meta" then
      metadata:set(NAMESPACE, name, text)
      if name == "turn" then
        metadata:set(NAMESPACE, "router", router)
      end
    elseif word == "keep" then
      local from, to = match(value, "^(%d+) (%d+)$")
      keep(body, tonumber(from), tonumber(to))
      edited = true
    elseif word == "put" then
      made:put(sub(rest, at, at + value - 1))
      at, edited = at + value, true
    end
  end
  if edited then
    headers:remove("transfer-encoding") -- the new body's length is known, and Envoy writes it
    handle:body():setBytes(made:tostring())
    if #made > KEEP then
      made:free()
    end
  end
  if answer then
    handle:respond(answer, rest)
  end
  handle:clearRouteCache()
end

-- Whether the router looks at the body: of turns, of JSON, of forms. Once Envoy has begun to pass it on there is no way
-- back, so the router cannot be asked.
local function is_read(headers)
  local kind = string.lower(headers:get("content-type") or "")
  if not find(kind, "[^ \t]") or find(kind, "json", 1, true) or find(kind, "form", 1, true) then
    return true
  end
  local path = gsub(match(headers:get(":path") or "", "^[^?]*"), "%%(%x%x)", function(hex)
    return string.char(tonumber(hex, 16))
  end)
  return TURNS[path]
end

local function request(handle)
  local headers = handle:headers()
  local head, kind, bytes = head_of(headers), "left", nil
  if is_read(headers) then
    local body = handle:body()
    kind, bytes = body and "whole" or "none", body and body:getBytes(0, body:length())
  end
  local router, said = ask(handle, head, kind, bytes or "")
  if router then
    apply(handle, router, said, bytes)
  else
    no_router(handle, said)
  end
end

function envoy_on_request(handle)
  if handle:streamInfo():routeName() == "plain" and BODILESS[handle:headers():get(":method")] then
    return -- nothing that a client could hide something in
  end
  local fine, problem = pcall(request, handle)
  if not fine then
    handle:logErr("kvreturn: the fast lane failed with a request: " .. tostring(problem))
    refuse(handle, "500", FAILED)
  end
end
