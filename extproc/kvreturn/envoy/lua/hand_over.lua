-- Holds the end of an answer until the router has what it left: only then can the client send the next turn.
--
-- fast_lane.lua, which comes before on the response path, puts that part into the metadata when the answer ends. A
-- script that waits for trailers is not woken for chunks, and is for the end of a body without any. The call is
-- synchronous: Envoy holds that end, and what comes with it, until the router answers or TIMEOUT is over.
-- An answer that its node keeps has its first event held too. Envoy lets go of that with the next chunk.
-- A router that is dead or slow costs no more than TIMEOUT; what passes is stripped already.

local HOLD = "kvreturn.hold"

local function tell(handle, info, which)
  local metadata = handle:streamInfo():dynamicMetadata()
  local part = metadata:get(HOLD)
  local about, text = string.match(part and part[which] or "", "^([^\n]*)\n(.*)$")
  if about then
    metadata:set(HOLD, which, "") -- access logs may tell all metadata
    local answer = tell_part(handle, info, about, text, TIMEOUT, false)
    -- Envoy's own answer (none of the router's in time, or no connection): the router takes each part once.
    if not answer["x-kvreturn-reply"] then -- now there is time, since nothing waits
      tell_part(handle, info, about, text, NO_WAIT, true)
    end
  end
  return about
end

function envoy_on_response(handle)
  handle:headers():remove("x-kvreturn-passes")
  local info = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  if not (info and info["taken"]) then
    return
  end
  if info["early"] then
    for _ in handle:bodyChunks() do
      if tell(handle, info, "first") then
        break
      end
    end
  end
  handle:trailers()
  tell(handle, info, "end")
end
