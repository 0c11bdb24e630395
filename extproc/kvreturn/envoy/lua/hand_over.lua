-- Holds the end of an answer until the router has what it left: only then can the client send the next turn.
--
-- fast_lane.lua, which comes before on the response path, puts that part into the metadata when it passes. The call is
-- synchronous: Envoy holds this chunk, and all that follow, until the router answers or TIMEOUT is over. Then the
-- script ends, and Envoy lets go of them. Would it wait for one more chunk instead, they were held until that comes:
-- so it is with the first event of an answer that a node keeps.
-- A router that is dead or slow costs no more than TIMEOUT; what passes is stripped already.

local NAMESPACE, HOLD = "kvreturn", "kvreturn.hold"

local function tell(handle, info, which)
  local metadata = handle:streamInfo():dynamicMetadata()
  local part = metadata:get(HOLD)
  local about, text = string.match(part and part[which] or "", "^([^\n]*)\n(.*)$")
  if about then
    metadata:set(HOLD, which, "") -- access logs may tell all metadata
    local answer = tell_part(handle, info, about, text, TIMEOUT, false)
    -- Envoy's own answer to a gRPC call (no answer in time, or no connection) is 200 with this status, "unavailable".
    if answer["grpc-status"] == "14" then -- now there is time, since nothing waits; the router takes each part once
      tell_part(handle, info, about, text, NO_WAIT, true)
    end
  end
  return about
end

function envoy_on_response(handle)
  local info = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  if not (info and info["lane"]) then
    return
  end
  for _ in handle:bodyChunks() do
    tell(handle, info, "first")
    if tell(handle, info, "end") then
      return
    end
  end
end
