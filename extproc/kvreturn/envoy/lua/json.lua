-- JSON as the fast lane reads it: takes members that name nodes out of an object, and nothing else.
--
-- The portable lane is the reference (kvreturn/core/jsontext.py, capture.py). For the same bytes both give the client
-- the same bytes; tests/lanes holds them to it. Whoever changes one changes both.
-- `kvreturn envoy-config` puts this file and others together into one script: what is local here is known there. This
-- one, members.lua, events.lua and kept.lua do not know Envoy: bytes in, bytes out. Lua 5.1, as Envoy's LuaJIT has it.

local find, match, sub, byte, gsub = string.find, string.match, string.sub, string.byte, string.gsub

local HIDDEN = { ['"kv_transfer_params"'] = true, ['"ec_transfer_params"'] = true }
local HINT = '_transfer_params"' -- the end of each: one search instead of two
local NESTED = { "response", "message" } -- events of /v1/responses and /v1/messages have the whole object below these
local IDENTITY = { id = 1, object = 1, created = 1, model = 1, choices = 1, system_fingerprint = 1, service_tier = 1 }
local MAX_MEMBERS, MAX_DEPTH, LONGEST_NAME = 10000, 500, 256

local function hides(text)
  return find(text, '"kv_transfer_params"', 1, true) or find(text, '"ec_transfer_params"', 1, true)
end

-- JSON: every function takes a text and a position, and gives the position behind what stands there, nil if that is
-- no JSON.

local value -- objects and arrays hold values

local function white(s, i)
  return find(s, "[^ \t\n\r]", i) or #s + 1
end

local function text_end(s, i)
  while true do
    i = find(s, '["\\%c]', i + 1)
    local c = i and byte(s, i)
    if c == 34 then
      return i + 1
    elseif c == 92 then
      i = match(s, '^[\\"/bfnrt]()', i + 1) or match(s, "^u%x%x%x%x()", i + 1)
      if not i then
        return nil
      end
      i = i - 1
    elseif c ~= 127 then
      return nil -- a control character, or the end of the text
    end
  end
end

local function number_end(s, i)
  local e = match(s, "^%-?0()", i) or match(s, "^%-?[1-9]%d*()", i)
  if e then
    e = match(s, "^%.%d+()", e) or e
    return match(s, "^[eE][+-]?%d+()", e) or e
  end
  return match(s, "^%-?Infinity()", i) -- Python reads it
end

-- Behind an item: where the next one begins, or nil and where the container ends; nothing if it does neither.
local function behind_item(s, i, close)
  i = white(s, i)
  local c = byte(s, i)
  if c == close then
    return nil, i + 1
  elseif c == 44 then
    return white(s, i + 1), nil
  end
end

local function array_end(s, i, depth)
  i = white(s, i + 1)
  if byte(s, i) == 93 then
    return i + 1
  end
  while i do
    i = value(s, i, depth)
    if not i then
      return nil
    end
    local stop
    i, stop = behind_item(s, i, 93)
    if stop then
      return stop
    end
  end
end

-- With `members`, these are filled in: name (decoded), where name and value begin, where the value ends.
local function object_end(s, i, depth, members)
  i = white(s, i + 1)
  if byte(s, i) == 125 then
    return i + 1
  end
  while i do
    local start = i
    local name_end = byte(s, i) == 34 and text_end(s, i)
    i = name_end and white(s, name_end)
    if not i or byte(s, i) ~= 58 then
      return nil
    end
    local at = white(s, i + 1)
    i = value(s, at, depth)
    if not i then
      return nil
    end
    if members then
      local name = gsub(sub(s, start + 1, name_end - 2), "\\u00(%x%x)", function(hex)
        return string.char(tonumber(hex, 16))
      end)
      members[#members + 1] = { name = name, start = start, value = at, stop = i }
      if #members > MAX_MEMBERS then
        return nil
      end
    end
    local stop
    i, stop = behind_item(s, i, 125)
    if stop then
      return stop
    end
  end
end

function value(s, i, depth)
  local c = byte(s, i)
  if c == 34 then
    return text_end(s, i)
  elseif c == 123 or c == 91 then
    if depth >= MAX_DEPTH then
      return nil
    end
    return (c == 123 and object_end or array_end)(s, i, depth + 1)
  end
  return number_end(s, i) or match(s, "^true()", i) or match(s, "^false()", i) or match(s, "^null()", i)
    or match(s, "^NaN()", i)
end

local UTF8 = {
  "^[\194-\223][\128-\191]()", "^\224[\160-\191][\128-\191]()", "^[\225-\236\238\239][\128-\191][\128-\191]()",
  "^\237[\128-\159][\128-\191]()", "^\240[\144-\191][\128-\191][\128-\191]()",
  "^[\241-\243][\128-\191][\128-\191][\128-\191]()", "^\244[\128-\143][\128-\191][\128-\191]()",
}

local function is_utf8(s)
  local i = find(s, "[\128-\255]")
  while i do
    local e
    for _, pattern in ipairs(UTF8) do
      e = e or match(s, pattern, i)
    end
    if not e then
      return false
    end
    i = find(s, "[\128-\255]", e)
  end
  return true
end

-- The members of a text that is exactly one object, else nil.
local function members_of(s)
  local members = {}
  local open = white(s, 1)
  local e = byte(s, open) == 123 and object_end(s, open, 1, members)
  return e and white(s, e) > #s and members or nil
end

-- The text without hidden members, each with one comma, and with new values for the last members of other names.
local function edit(s, members, put)
  local last = {}
  for i, m in ipairs(members) do
    last[m.name] = i
  end
  local out, at, kept, pending = {}, 1, false, nil
  local function cut(from, to, new)
    out[#out + 1] = sub(s, at, from - 1) .. (new or "")
    at = to
  end
  for i, m in ipairs(members) do
    if HIDDEN['"' .. m.name .. '"'] or (put[m.name] and last[m.name] ~= i) then
      if kept then
        cut(members[i - 1].stop, m.stop)
      else
        pending = pending or m.start -- dropped before any is kept: they take the comma behind them
      end
    else
      if pending then
        cut(pending, m.start)
        pending = nil
      end
      kept = true
      if put[m.name] then
        cut(m.value, m.stop, put[m.name])
      end
    end
  end
  if pending then
    cut(pending, members[#members].stop)
  end
  return table.concat(out) .. sub(s, at)
end

-- An event's JSON without what is hidden, and whether there was a handle: what is not null. Nil if it is no JSON object.
local function strip_object(s)
  local members = members_of(s)
  if not members then
    return nil
  end
  local put, handle = {}, false
  for _, m in ipairs(members) do
    handle = handle or (HIDDEN['"' .. m.name .. '"'] and sub(s, m.value, m.stop - 1) ~= "null")
  end
  for _, name in ipairs(NESTED) do
    local inner
    for _, m in ipairs(members) do
      inner = m.name == name and sub(s, m.value, m.stop - 1) or inner
    end
    if inner and byte(inner, 1) == 123 and hides(inner) then
      local stripped, inside = strip_object(inner)
      if not stripped then
        return nil
      end
      put[name], handle = stripped, handle or inside
    end
  end
  return edit(s, members, put), handle
end

-- Whether nothing is left in an event that a client could want.
local function says_nothing(s)
  local last = {}
  for _, m in ipairs(members_of(s)) do
    last[m.name] = sub(s, m.value, m.stop - 1)
  end
  for name, raw in pairs(last) do
    local empty = raw == "null" or raw == "false" or raw == '""' or tonumber(raw) == 0
      or match(raw, "^%[[ \t\n\r]*%]$") or match(raw, "^{[ \t\n\r]*}$")
    if not empty and (name == "choices" or not IDENTITY[name]) then
      return false
    end
  end
  return true
end
