-- Envoy's Lua filter as of 1.40, as far as the fast lane uses it, for scripts that run in a test's Lua interpreter.
--
-- A script is run once; each direction of an exchange is a coroutine of it. Coroutines yield for a body, the next chunk,
-- trailers, and in synchronous calls. What a script got before it yielded is dead behind that, all but tables and texts;
-- behind the last chunk of a body it does not yield. What Envoy refuses is an error here too.

local Headers = {}
Headers.__index = Headers

-- `flat`: names and values in turn.
local function new_headers(flat)
  local self = setmetatable({ fields = {} }, Headers)
  for i = 1, #flat, 2 do
    self.fields[#self.fields + 1] = { string.lower(flat[i]), flat[i + 1] }
  end
  return self
end

function Headers:get(name)
  local values = {}
  for _, field in ipairs(self.fields) do
    values[#values + 1] = field[1] == string.lower(name) and field[2] or nil
  end
  if #values > 0 then
    return table.concat(values, ",")
  end -- no value at all, which is less than nil
end

function Headers:remove(name)
  for i = #self.fields, 1, -1 do
    if self.fields[i][1] == string.lower(name) then
      table.remove(self.fields, i)
    end
  end
end

function Headers:replace(name, value)
  self:remove(name)
  self.fields[#self.fields + 1] = { string.lower(name), value }
end

local Stream = {}
Stream.__index = Stream

local Worker = {}
Worker.__index = Worker

-- One of Envoy's worker threads, in which a script is loaded.
local function worker(source)
  local self = setmetatable({ now = 0, clock = function() return os.time() end }, Worker)
  local env = setmetatable({ os = { time = function() return self.clock() end } }, { __index = _G })
  env.pairs = function(of) -- Envoy's LuaJIT knows `__pairs`
    local iterate = (getmetatable(of) or {}).__pairs
    if iterate then
      return iterate(of)
    end
    return pairs(of)
  end
  self.env = env
  setfenv(assert(loadstring(source)), env)()
  return self
end

-- One direction of an exchange begins: its headers are here.
-- `exchange.metadata`: namespaces, shared by all filters. `exchange.route`: the route's name.
-- `exchange.call(cluster, headers, body, timeout, asynchronous)`: takes calls, and gives the answer's headers and body;
-- nothing if there is no such cluster. `exchange.slow`: these come when the whole body has, and not before.
local function begin(self, entry, exchange, headers, ended)
  local stream = setmetatable({
    worker = self,
    exchange = exchange,
    headers = headers,
    ended = ended, -- nothing more comes
    seen = false, -- some of the body has come
    buffered = nil, -- what the script waits for, or has
    held = nil, -- what came while it waited
    gone = false, -- the headers are
    age = 0, -- how often the script has yielded
    errors = {},
    cleared = 0, -- how often a route was to be chosen again
    response = nil, -- the script's own
  }, Stream)
  local handle = stream:handle()
  stream.routine = coroutine.create(function() self.env[entry](handle) end)
  stream:resume()
  return stream
end

function Worker:request(exchange, headers, ended)
  return begin(self, "envoy_on_request", exchange, headers, ended)
end

function Worker:response(exchange, headers)
  return begin(self, "envoy_on_response", exchange, headers, false)
end

-- An object of these methods that dies with the next yield.
function Stream:mortal(methods, iterate)
  local age, object = self.age, {}
  local function alive()
    if age ~= self.age then
      error("object used outside of proper scope", 0)
    end
  end
  for name, method in pairs(methods) do
    object[name] = function(of, ...)
      assert(of == object, "a method is called with a colon")
      alive()
      return method(...)
    end
  end
  return setmetatable(object, { __pairs = iterate and function() alive() return iterate() end })
end

function Stream:yield(...)
  self.age = self.age + 1
  return coroutine.yield(...)
end

function Stream:header_map()
  local headers, iterating = self.headers, false
  local function change()
    assert(not iterating, "header map cannot be modified while iterating")
    assert(not self.gone, "header map can no longer be modified")
  end
  return self:mortal({
    get = function(name) return headers:get(name) end,
    replace = function(name, value)
      change()
      assert(type(value) == "string", "string expected")
      headers:replace(name, value)
    end,
    remove = function(name) change() headers:remove(name) end,
  }, function()
    assert(not iterating, "cannot create a second iterator before completing the first")
    iterating = true
    local i = 0
    return function()
      i = i + 1
      local field = headers.fields[i]
      if field then
        return field[1], field[2]
      end
      iterating = false
    end
  end)
end

function Stream:info()
  local metadata = self.exchange.metadata
  return self:mortal({
    routeName = function() return self.exchange.route end,
    dynamicMetadata = function()
      return self:mortal({
        get = function(namespace)
          if metadata[namespace] then
            local copy = {}
            for key, value in pairs(metadata[namespace]) do
              copy[key] = value
            end
            return copy
          end
        end,
        set = function(namespace, key, value)
          metadata[namespace] = metadata[namespace] or {}
          metadata[namespace][key] = value
        end,
      })
    end,
  })
end

-- Bytes as scripts get them; `of.bytes` is what they are.
function Stream:buffer(of)
  return self:mortal({
    length = function() return #of.bytes end,
    getBytes = function(at, size)
      assert(at >= 0 and size >= 0 and at + size <= #of.bytes,
        "index/length must be >= 0 and (index + length) must be <= buffer size")
      return string.sub(of.bytes, at + 1, at + size)
    end,
    setBytes = function(bytes)
      of.bytes = bytes
      if not self.gone then
        self.headers:replace("content-length", tostring(#bytes))
      end
    end,
  })
end

local BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

local function base64(text)
  local out = {}
  for i = 1, #text, 3 do
    local a, b, c = string.byte(text, i, i + 2)
    local bits = a * 65536 + (b or 0) * 256 + (c or 0)
    for place = 3, 0, -1 do
      local digit = math.floor(bits / 64 ^ place) % 64 + 1
      out[#out + 1] = string.sub(BASE64, digit, digit)
    end
    if not c then
      out[#out] = "="
    end
    if not b then
      out[#out - 1] = "="
    end
  end
  return table.concat(out)
end

local function is_address(host)
  return string.find(host, "^%d+%.%d+%.%d+%.%d+:?%d*$") or string.find(host, "^%[[%x:.]+%]:%d+$")
end

function Stream:handle()
  local exchange = self.exchange
  return {
    headers = function() return self:header_map() end,
    streamInfo = function() return self:info() end,
    timestamp = function() return self.worker.now end,
    logErr = function(_, text) self.errors[#self.errors + 1] = text end,
    base64Escape = function(_, text) return base64(text) end,
    clearRouteCache = function() self.cleared = self.cleared + 1 end,
    setUpstreamOverrideHost = function(_, host, strict)
      assert(is_address(host), "host is not a valid IP address")
      exchange.override, exchange.strict = host, strict
    end,
    httpCall = function(_, cluster, of_call, body, timeout, asynchronous)
      assert(of_call[":method"] and of_call[":path"] and of_call[":authority"], "http call headers must include ':path', ':method', and ':authority'")
      assert(timeout >= 0, "http call timeout must be >= 0")
      local headers, text = exchange.call(cluster, of_call, body, timeout, asynchronous == true)
      assert(headers, "http call cluster invalid. Must be configured")
      if not asynchronous then
        self:yield("call")
        return headers, text ~= "" and text or nil
      end
    end,
    respond = function(_, headers, body)
      assert(not self.gone, "respond() cannot be called if headers have been continued")
      local status = tonumber(headers[":status"])
      assert(status and status >= 200 and status < 600, ":status must be between 200-599")
      self.response = { headers = headers, body = body }
      self:yield("never")
    end,
    body = function()
      if self.ended then
        assert(self.buffered or not self.seen, "cannot call body() after body has been streamed")
      else
        assert(not self.seen, "cannot call body() after body streaming has started")
        self.buffered = { bytes = "" }
        self:yield("body")
      end
      if self.buffered then
        return self:buffer(self.buffered)
      end
    end,
    bodyChunks = function()
      return function()
        if not self.ended then
          self:yield("chunk")
          return self.current and self:buffer(self.current)
        end
      end
    end,
    trailers = function()
      if not self.ended then
        self:yield("trailers")
      end
    end,
  }
end

function Stream:resume()
  local fine, why = coroutine.resume(self.routine)
  self.waits = coroutine.status(self.routine) ~= "dead" and why or nil
  if not fine then -- Envoy logs it, and all passes as it is
    self.errors[#self.errors + 1] = why
  elseif self.waits == "call" and (self.ended or not self.exchange.slow) then
    return self:resume()
  end
  self.gone = self.waits ~= "body" and self.waits ~= "call"
end

-- A chunk passes, which may be the last; what goes on.
function Stream:chunk(bytes, last)
  self.seen, self.ended = true, last
  if self.waits == "never" then
    return ""
  elseif self.waits == "body" or self.waits == "call" then
    local held = self.buffered or self.held or { bytes = "" }
    self.held = held
    held.bytes = held.bytes .. bytes
    if not last then
      return ""
    end
    self:resume()
    return self.waits == "never" and "" or held.bytes
  elseif self.waits == "chunk" then
    local chunk = { bytes = bytes }
    self.current = chunk
    self:resume()
    return chunk.bytes
  elseif self.waits == "trailers" and last then
    self:resume()
  end
  return bytes
end

-- Trailers end the body.
function Stream:trailers()
  self.ended, self.current = true, nil
  if self.waits then
    self:resume()
  end
end

return { worker = worker, headers = new_headers }
