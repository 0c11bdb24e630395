-- Envoy's stream handle, as far as the fast lane uses it, for scripts that run in a test's Lua interpreter.
--
-- Scripts are coroutines that yield for the next chunk, for trailers and in synchronous calls, as in Envoy. A chunk is
-- dead once the script has yielded; behind the last one of a body it does not. What Envoy refuses is an error here too.

local Stream = {}
Stream.__index = Stream

local compiled = {}

-- `source`: a script. `headers`: of the answer. `metadata`: namespaces, shared by the filters of one exchange.
-- `call(cluster, headers, body, timeout, asynchronous)`: takes the script's calls, and gives the answer's gRPC status, nil for a good one.
local function stream(source, headers, metadata, call)
  local env = setmetatable({}, { __index = _G })
  compiled[source] = compiled[source] or assert(loadstring(source))
  setfenv(compiled[source], env)()
  local self = setmetatable({ errors = {}, now = 0, clock = function() return os.time() end }, Stream)
  env.os = { time = function() return self.clock() end }
  local chunk
  local function alive(of)
    assert(of == chunk, "object used outside of proper scope")
  end
  local function metadata_of(_, namespace)
    return metadata[namespace]
  end
  local handle = {
    headers = function() return { get = function(_, name) return headers[name] end } end,
    streamInfo = function()
      return { dynamicMetadata = function()
        return { get = metadata_of, set = function(_, namespace, key, value)
          metadata[namespace] = metadata[namespace] or {}
          metadata[namespace][key] = value
        end }
      end }
    end,
    timestamp = function() return self.now end,
    logErr = function(_, text) self.errors[#self.errors + 1] = text end,
    httpCall = function(_, cluster, of_call, body, timeout, asynchronous)
      assert(of_call[":method"] and of_call[":path"] and of_call[":authority"], "http call headers must include these")
      if asynchronous then
        call(cluster, of_call, body, timeout, true)
        return
      end
      chunk = nil
      return coroutine.yield("call", cluster, of_call, body, timeout)
    end,
    bodyChunks = function()
      return function()
        if not self.ended then
          return coroutine.yield("chunk")
        end
      end
    end,
    trailers = function()
      if not self.ended then
        coroutine.yield("trailers")
      end
    end,
  }
  self.call = call
  self.metadata = metadata
  self.chunk_of = function(bytes)
    chunk = {
      length = function(c) alive(c) return #bytes end,
      getBytes = function(c, at, size)
        alive(c)
        assert(at + size <= #bytes, "index/length must be >= 0 and (index + length) must be <= buffer size")
        return string.sub(bytes, at + 1, at + size)
      end,
      setBytes = function(c, to) alive(c) bytes = to end,
    }
    return chunk, function() chunk = nil return bytes end
  end
  self.routine = coroutine.create(function() env.envoy_on_response(handle) end)
  self:resume()
  return self
end

function Stream:resume(...)
  local fine, why, cluster, headers, body, timeout = coroutine.resume(self.routine, ...)
  self.waits = why
  if not fine then -- Envoy logs it, and the body passes as it is
    self.errors[#self.errors + 1] = why
  elseif why == "call" then
    local status = self.call(cluster, headers, body, timeout, false)
    return self:resume({ [":status"] = "200", ["grpc-status"] = status }, "")
  end
end

-- A chunk passes, which may be the last; what goes on.
function Stream:chunk(bytes, last)
  self.ended = last
  if coroutine.status(self.routine) == "dead" or (self.waits == "trailers" and not last) then
    return bytes
  end
  local chunk, settled = self.chunk_of(bytes)
  if self.waits == "trailers" then
    self:resume()
    return bytes
  end
  self:resume(chunk)
  return settled()
end

-- Trailers end the body.
function Stream:trailers()
  self.ended = true
  if coroutine.status(self.routine) ~= "dead" then
    self:resume(nil)
  end
end

return stream
