-- Server-sent events: cuts a stream at their ends, and has what is hidden taken out of those that have it.
--
-- As kvreturn/core/sse.py, and StreamCapture in capture.py. Lines end in LF, CRLF or CR; a blank line ends an event.

local BOM = "\239\187\191" -- may lead a stream

-- Calls `each` with the end of every blank line, and of all that follow it: runs of two line ends or more.
local function blanks(s, from, each)
  local i, e = find(s, "[\r\n]+", from)
  while i do
    local _, pairs_of = gsub(sub(s, i, e), "\r\n", "")
    if e - i + 1 - pairs_of > 1 then
      each(e)
    end
    i, e = find(s, "[\r\n]+", e + 1)
  end
end

-- Calls `each` with every line and its end.
local function each_line(raw, each)
  local at = 1
  while at <= #raw do
    local e = find(raw, "[\r\n]", at) or #raw + 1
    local stop = sub(raw, e, e + 1) == "\r\n" and e + 1 or e
    each(sub(raw, at, e - 1), sub(raw, e, stop))
    at = stop + 1
  end
end

-- Field and value of a line; a comment's field is empty.
local function field(line)
  local name, text = match(line, "^([^:]*):? ?(.*)$")
  return sub(name, 1, 3) == BOM and sub(name, 4) or name, text
end

-- The event's data lines joined, nil if it has none.
local function data_of(raw)
  local data
  each_line(raw, function(line)
    local name, text = field(line)
    if name == "data" then
      data = data and data .. "\n" .. text or text
    end
  end)
  return data
end

-- The event with other data, on one line. All lines but the data lines stay as they are.
local function with_data(raw, data)
  local out, done = {}, false
  each_line(raw, function(line, line_end)
    local name, text = field(line)
    if name ~= "data" then
      out[#out + 1] = line .. line_end
    elseif not done then
      done = true
      out[#out + 1] = sub(line, 1, #line - #text) .. gsub(data, "[\r\n]", " ") .. line_end
    end
  end)
  return table.concat(out)
end

local Events = {}
Events.__index = Events

-- `limit`: bytes up to which an event is kept; a larger one goes on as it comes, stripped. That bounds the memory.
local function new_events(limit)
  return setmetatable({
    limit = limit,
    parts = {}, -- of the incomplete event that is held back
    pending = 0, -- their bytes
    last = "", -- the last three of these
    after_cr = false, -- an event went out at its blank line's CR: an LF behind it still belongs to it
    dropped = false, -- the last event was; more of its blank lines may follow
    found = false, -- whether a handle has passed; /v1/responses names a null one in its first events
    stripper = nil, -- while an event over the limit passes
    passed = "", -- the last bytes that went through it
  }, Events)
end

function Events:decode(data)
  if self.stripper then
    return self:strip(data)
  end
  local out = self:rewritten(self:complete(data))
  if self.pending > self.limit then
    self.stripper = members_stripper(true)
    out = out .. self:strip("")
  end
  return out
end

-- The end of the stream.
function Events:flush()
  if not self.stripper then
    return self:rewritten(self:held())
  end
  local out = self:strip("")
  return out .. (self.stripper and self.stripper:flush() or "")
end

function Events:complete(data)
  if self.pending == 0 and sub(data, -2) == "\n\n" then -- what vLLM sends: whole events
    self.after_cr = false
    return data
  end
  local lead = ""
  if self.after_cr and data ~= "" then
    self.after_cr = false
    if byte(data, 1) == 10 then
      lead, data = "\n", sub(data, 2)
    end
  end
  local probe, cut = self.last .. data, nil
  blanks(probe, 1, function(e)
    cut = e
  end)
  self.parts[#self.parts + 1] = data
  if not cut then
    self.pending, self.last = self.pending + #data, sub(probe, -3)
    return lead
  end
  local text, rest = self:held(), sub(probe, cut + 1)
  local out = lead .. sub(text, 1, #text - #rest)
  self.parts, self.pending, self.last = { rest }, #rest, sub(rest, -3)
  self.after_cr = rest == "" and byte(out, -1) == 13
  return out
end

function Events:held()
  local text = table.concat(self.parts)
  self.parts, self.pending, self.last = {}, 0, ""
  return text
end

function Events:rewritten(text)
  local hidden = find(text, HINT, 1, true) and hides(text)
  if not (hidden or self.dropped) then
    return text
  end
  -- Line ends that lead are an event of their own: they may be the rest of the blank line before.
  local out, at = {}, match(text, "^[\r\n]+()") or 1
  out[1] = self:event(sub(text, 1, at - 1))
  blanks(text, at, function(e)
    out[#out + 1] = self:event(sub(text, at, e))
    at = e + 1
  end)
  out[#out + 1] = self:event(sub(text, at))
  return table.concat(out)
end

function Events:event(raw)
  if raw == "" or (self.dropped and not find(raw, "[^\r\n]")) then
    return "" -- clients take a blank line too many for an empty event
  end
  self.dropped = false
  local data = data_of(raw)
  if not data then -- no event, but perhaps JSON that goes by the wrong name
    return match(raw, "^%s*{") and strip_text(raw, false) or raw
  elseif not hides(data) then
    return raw
  end
  local stripped, handle
  if is_utf8(data) then
    stripped, handle = strip_object(data)
  end
  self.found = self.found or handle
  if not stripped then
    return strip_text(raw, true)
  elseif stripped == data then
    return raw
  end
  -- An event that only brought the handle would never have been sent without it, and clients read choices[0].
  self.dropped = says_nothing(stripped)
  return self.dropped and "" or with_data(raw, stripped)
end

function Events:strip(data)
  data = self:held() .. data -- what was held back when it began
  local before, stop = #self.passed, nil
  blanks(self.passed .. data, 1, function(e)
    stop = stop or (e > before and e - before or nil)
  end)
  if not stop then
    self.passed = sub(self.passed .. data, -3)
    return self.stripper:decode(data)
  end
  local out = self.stripper:decode(sub(data, 1, stop)) .. self.stripper:flush()
  self.stripper, self.passed = nil, ""
  return out .. self:decode(sub(data, stop + 1))
end
