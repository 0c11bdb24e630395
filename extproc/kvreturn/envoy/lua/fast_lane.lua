-- The fast lane: tokens pass here at Envoy's own cost; the router gets what it must know in few calls.
--
-- Envoy's contract, as of 1.40:
--  * On the response path filters run from the last to the first: this one, ext_proc, hand_over.lua. The latter must not
--    come before ext_proc: bytes that a filter holds are let go by any other one that waited for something with the
--    headers.
--  * A script is a coroutine. While it waits in a synchronous call, chunks that come are held, and pass it unseen when
--    the call is over. So this script never makes one: it sees every byte. hand_over.lua makes the call that must hold
--    the stream; what it does not see is clean already.
--  * A chunk is alive until the script yields, so its bytes are set at once or never. Behind the last chunk of a body
--    the loop ends without a yield: that one is still alive, and has room for what was held back. HTTP/1 ends a body by
--    an empty chunk. Behind trailers no chunk is alive, and what was held back, a turn's whole end, would be lost. So only
--    an answer in HTTP/1's chunks is taken on, of which Envoy drops trailers; HTTP/2 may end any by them, unannounced.
--  * A script that fails is over, and the rest of the body passes as it is. So what may fail is called by `pcall`, and
--    if it has failed, nothing more passes: a cut stream rather than a leaking one.
--
-- From the event with the handle on, all is held back until the answer's end, so that hand_over.lua has nothing to hold
-- but that end, and need not be woken for any other chunk. A node that ends a turn ends its answer in the same moment.
--
-- The script takes an answer on if the router has said that it may, and if it is a stream of events that can be read.
-- All other answers of turns (one JSON text, refusals, compressed ones) go through the router, by ext_proc. That filter
-- is left out where this script says so, in a header that hand_over.lua removes: for what it has taken on, and for
-- answers that are none of the router's business.

local HOLD = "kvreturn.hold"
local PASSES = "x-kvreturn-passes"
local PART_BYTES, PART_SECONDS = 262144, 20 -- what is kept for the router at most, and for how long
local MARKS = 16 -- pieces that are timed: the first token is in one of these
local BACK_BYTES = 65536 -- what is held back of an answer that goes on and on behind the piece with its handle

local Answer = {}
Answer.__index = Answer

local function new_answer(info, status, now)
  return setmetatable({
    info = info,
    begun = { status, now, info["upstream"] or "" }, -- until the router has heard of it
    events = new_events(EVENT_BYTES),
    kept = new_kept(), -- the node's bytes that the router has not got
    since = os.time(),
    number = 0, -- of the last part
    marks = {},
    timed = 0,
    early = info["early"] ~= nil, -- the router must know of the first event before the client does
    back = nil, -- what is held back, a list, from the event with the handle on
    room = BACK_BYTES,
  }, Answer)
end

function Answer:keep(handle, bytes)
  self.kept:add(bytes)
  if self.timed < MARKS then
    self.timed = self.timed + 1
    self.marks[#self.marks + 1] = { #bytes, handle:timestamp() }
  end
end

-- Gives what is kept to the router: at once, or by hand_over.lua, which holds the bytes that are passing until then.
function Answer:hand(handle, last, hold)
  self.number = self.number + 1
  local now, about = handle:timestamp(), { self.number, last and 1 or 0 }
  if self.begun then
    about[3] = string.format("%d,%d,%s", self.begun[1], now - self.begun[2], self.begun[3])
    self.begun = nil
  end
  for _, mark in ipairs(self.marks) do
    about[#about + 1] = string.format("%d:%d", mark[1], now - mark[2])
  end
  local text, said = self.kept:take(), table.concat(about, " ")
  self.since, self.marks = os.time(), {}
  if hold then
    handle:streamInfo():dynamicMetadata():set(HOLD, hold, said .. "\n" .. text)
  else
    tell_part(handle, self.info, said, text, NO_WAIT, true)
  end
end

-- What of these bytes goes on now.
function Answer:pass(handle, bytes)
  self:keep(handle, bytes)
  local out = self.events:decode(bytes)
  if self.events.found and self.room > 0 then
    if not self.back then -- however large: the last event of /v1/responses has the whole answer in it, tools and all
      self.back = { out }
      return ""
    end
    self.back[#self.back + 1] = out
    self.room = self.room - #out
    return self.room > 0 and "" or self:release("")
  end
  return out
end

-- What was held back, and more.
function Answer:release(more)
  local back = self.back
  self.back = nil
  return back and table.concat(back) .. more or more
end

local function pass(handle, answer, chunk)
  local bytes = chunk:getBytes(0, chunk:length())
  local out = answer:pass(handle, bytes)
  if out ~= bytes then
    chunk:setBytes(out)
  end
  local first = answer.early and out ~= ""
  if first then
    answer.early = false
  end
  if first or answer.kept.bytes >= PART_BYTES or os.time() - answer.since >= PART_SECONDS then
    -- The client's stream goes on, whatever becomes of it.
    pcall(answer.hand, answer, handle, false, first and "first" or nil)
  end
end

local function finish(answer, chunk)
  local out = answer:release(answer.events:flush())
  if out ~= "" then
    chunk:setBytes(chunk:getBytes(0, chunk:length()) .. out)
  end
end

-- Other routers' headers are none of the client's business.
local function without_foreign(headers)
  local foreign = {}
  for name in pairs(headers) do
    for _, prefix in ipairs(FOREIGN_PREFIXES) do
      if FOREIGN[name] or sub(name, 1, #prefix) == prefix then
        foreign[#foreign + 1] = name
        break
      end
    end
  end
  for _, name in ipairs(foreign) do
    headers:remove(name)
  end
end

function envoy_on_response(handle)
  local metadata, headers = handle:streamInfo():dynamicMetadata(), handle:headers()
  headers:remove(PASSES) -- a node's own would let a handle pass
  local info = metadata:get(NAMESPACE)
  if not (info and info["turn"]) then
    headers:replace(PASSES, "1")
    return
  end
  local kind, status = headers:get("content-type") or "", tonumber(headers:get(":status")) or 0
  local readable = string.find(string.lower(kind), "text/event-stream", 1, true) == 1
    and headers:get("transfer-encoding") and not headers:get("content-encoding") and not headers:get("trailer")
  if not (info["lane"] and readable and status < 400) then
    return
  end
  local answer, failed, ending = new_answer(info, status, handle:timestamp()), nil, nil
  without_foreign(headers)
  if info["request_id"] and headers:get("x-request-id") then
    headers:replace("x-request-id", info["request_id"]) -- the client's own
  end
  headers:replace(PASSES, "1")
  headers:remove("content-length") -- Envoy's Lua sets one with each chunk that it changes, for as long as they are here
  metadata:set(NAMESPACE, "taken", "1")
  for chunk in handle:bodyChunks() do
    ending = chunk
    if not failed and chunk:length() > 0 then
      local fine, problem = pcall(pass, handle, answer, chunk)
      failed = not fine and problem
      if failed then
        handle:logErr("kvreturn: the fast lane failed, and cuts an answer: " .. tostring(failed))
      end
    end
    if failed then
      chunk:setBytes("")
    end
  end
  -- It fails behind trailers: nothing can go on, and nothing be held.
  local whole = not failed and ending and pcall(finish, answer, ending)
  pcall(answer.hand, answer, handle, true, whole and "end" or nil)
end
