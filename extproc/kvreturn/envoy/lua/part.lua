-- How a part of an answer goes to the router: by a unary gRPC call, written by hand.
--
-- `about` is the part's number, from 1; 1 if it is the last; and for the first pieces of it how many bytes they have
-- and how many milliseconds ago they came. The turn's name is a secret between the router and this script: only what
-- stands in Envoy's dynamic metadata has it, which no client and no node sees.

local NO_WAIT = 5000 -- milliseconds that a call may take for which nothing waits

local function part_headers(info, about)
  return {
    [":method"] = "POST",
    [":path"] = "/kvreturn.FastLane/Part",
    [":authority"] = info["router"],
    ["content-type"] = "application/grpc",
    ["te"] = "trailers",
    ["x-kvreturn-turn"] = info["turn"],
    ["x-kvreturn-part"] = about,
  }
end

-- One byte that says "not compressed", four of length.
local function framed(text)
  local n = #text
  return string.char(0, math.floor(n / 16777216) % 256, math.floor(n / 65536) % 256, math.floor(n / 256) % 256, n % 256)
    .. text
end

local function tell_part(handle, info, about, text, timeout, asynchronous)
  return handle:httpCall(info["router"], part_headers(info, about), framed(text), timeout, asynchronous)
end
