-- The fast lane: tokens pass here at Envoy's own cost; the router gets what it must know in few calls.
--
-- Envoy's contract, as of 1.40:
--  * On the response path filters run from the last to the first: this one, ext_proc, hand_over.lua. The latter must not
--    come before ext_proc: bytes that a filter holds are let go by any other one that waited for something with the
--    headers.
--  * A script is a coroutine. While it waits in a synchronous call, chunks that come are held, and pass it unseen when
--    the call is over. So this script never makes one: it sees every byte. hand_over.lua makes the call that must hold
--    the stream; what it does not see is clean already.
--  * A chunk is alive until the script yields, so its bytes are set at once or never.
--  * A script that fails is over, and the rest of the body passes as it is. So what may fail is called by `pcall`, and
--    if it has failed, nothing more passes: a cut stream rather than a leaking one.
--  * HTTP/1 ends a body by an empty chunk, also where the length was known. Only that one has room for what was held
--    back; trailers have none, as in the portable lane.
--
-- The script takes an answer on if the router has named the turn, and if it is a stream of events that can be read.
-- Then it says so in the metadata, which the router gets with the response headers. All other answers (one JSON text,
-- refusals, compressed ones) go through the router as in the portable lane.

local NAMESPACE, HOLD = "kvreturn", "kvreturn.hold"
local PART_BYTES, PART_SECONDS = 131072, 20 -- what is kept for the router at most, and for how long
local MARKS = 16 -- pieces that are timed: the first token is in one of these

local Answer = {}
Answer.__index = Answer

local function new_answer(info)
  return setmetatable({
    info = info,
    events = new_events(EVENT_BYTES),
    kept = {}, -- the node's bytes that the router has not got
    size = 0,
    since = os.time(),
    number = 0, -- of the last part
    marks = {},
    timed = 0,
    early = info["early"] ~= nil, -- the router must know of the first event before the client does
    held = false, -- hand_over.lua has had the part for which it waits, and is gone
  }, Answer)
end

function Answer:keep(handle, bytes)
  self.kept[#self.kept + 1] = bytes
  self.size = self.size + #bytes
  if self.timed < MARKS then
    self.timed = self.timed + 1
    self.marks[#self.marks + 1] = { #bytes, handle:timestamp() }
  end
end

-- Gives what is kept to the router: at once, or by hand_over.lua, which holds the bytes that are passing until then.
function Answer:hand(handle, last, hold)
  self.number = self.number + 1
  local now, about = handle:timestamp(), { self.number, last and 1 or 0 }
  for _, mark in ipairs(self.marks) do
    about[#about + 1] = string.format("%d:%d", mark[1], now - mark[2])
  end
  local text, said = table.concat(self.kept), table.concat(about, " ")
  self.kept, self.size, self.since, self.marks = {}, 0, os.time(), {}
  if hold then
    handle:streamInfo():dynamicMetadata():set(HOLD, hold, said .. "\n" .. text)
  else
    tell_part(handle, self.info, said, text, NO_WAIT, true)
  end
end

-- What of these bytes goes on, and whether the router must know of it before the client does.
function Answer:pass(handle, bytes, last)
  self:keep(handle, bytes)
  local out = last and self.events:flush() or self.events:decode(bytes)
  if self.early and out ~= "" then
    self.early = false
    return out, "first"
  elseif not self.held and (last or self.events.found) then
    self.held = true
    return out, "end"
  end
  return out, nil
end

local function pass(handle, answer, chunk)
  local size = chunk:length()
  local last, bytes = size == 0, size > 0 and chunk:getBytes(0, size) or ""
  local out, hold = answer:pass(handle, bytes, last)
  if out ~= bytes then
    chunk:setBytes(out)
  end
  if last then
    answer.ended = true
  end
  if hold or last or answer.size >= PART_BYTES or os.time() - answer.since >= PART_SECONDS then
    pcall(answer.hand, answer, handle, last, hold) -- the client's stream goes on, whatever becomes of it
  end
end

function envoy_on_response(handle)
  local metadata, headers = handle:streamInfo():dynamicMetadata(), handle:headers()
  local info = metadata:get(NAMESPACE)
  local kind, status = headers:get("content-type") or "", tonumber(headers:get(":status")) or 0
  local readable = string.find(string.lower(kind), "text/event-stream", 1, true) == 1
    and not headers:get("content-encoding")
  if not (info and info["turn"] and readable and status < 400) then
    return
  end
  local answer, failed = new_answer(info), nil
  metadata:set(NAMESPACE, "lane", info["turn"])
  for chunk in handle:bodyChunks() do
    if not failed then
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
  if not answer.ended then -- by trailers, or cut above
    pcall(answer.hand, answer, handle, true, nil)
  end
end
