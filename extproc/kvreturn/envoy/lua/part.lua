-- How a part of an answer goes to the router that has its turn.
--
-- `about` is the part's number, from 1; 1 if it is the last; in the first one how the answer began; and for the first
-- pieces of it how many bytes they have and how many milliseconds ago they came. The turn's name is a secret between the
-- router and this script: only what stands in Envoy's dynamic metadata has it, which no client and no node sees.

local NO_WAIT = 5000 -- milliseconds that a call may take for which nothing waits

local function tell_part(handle, info, about, text, timeout, asynchronous)
  local headers = {
    [":method"] = "POST",
    [":path"] = "/kvreturn/part",
    [":authority"] = "kvreturn",
    ["x-kvreturn-turn"] = info["turn"],
    ["x-kvreturn-part"] = about,
  }
  return handle:httpCall(CALLS .. info["router"], headers, text, timeout, asynchronous)
end
