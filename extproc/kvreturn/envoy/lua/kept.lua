-- What is kept of an answer for the router, in little room.
--
-- The pieces of a stream are of one form: all but a few bytes, the token, is the same in each. So of a piece that begins
-- and ends as the ones before only the middle is kept: else each stream would hold all that its node sends in 20 s.
--
-- Packed, as kvreturn/core/packed.py reads it: records one after another,
--     raw SIZE \n  and SIZE bytes as they came, or
--     run HEAD TAIL SIZE \n  and three texts of these sizes: how each piece begins, how each ends, and their middles with
--     line ends between them.

local LEAST = 48 -- bytes that pieces must have in common

local Kept = {}
Kept.__index = Kept

local function new_kept()
  return setmetatable({
    records = {},
    middles = {}, -- of the run that is under way
    count = 0, -- of these
    head = nil, -- how each of them begins
    tail = nil, -- and ends
    bytes = 0, -- that were kept, unpacked
  }, Kept)
end

local function same_start(a, b)
  local n = math.min(#a, #b)
  for i = 1, n do
    if byte(a, i) ~= byte(b, i) then
      return i - 1
    end
  end
  return n
end

local function same_end(a, b, most)
  for i = 1, most do
    if byte(a, -i) ~= byte(b, -i) then
      return i - 1
    end
  end
  return most
end

function Kept:add(piece)
  self.bytes = self.bytes + #piece
  local head, tail = self.head, self.tail
  if head and sub(piece, 1, #head) == head and sub(piece, -#tail) == tail and #piece >= #head + #tail then
    local middle = sub(piece, #head + 1, -#tail - 1)
    if not find(middle, "\n", 1, true) then
      local count = self.count + 1
      self.middles[count], self.count = middle, count
      return
    end
  end
  self:close_run()
  self.records[#self.records + 1] = string.format("raw %d\n", #piece) .. piece
  self:learn(piece)
end

-- Head and tail only get shorter, so that they fit all pieces after a few; a piece of another form begins afresh. What
-- overlaps at first fits no piece of its own length.
function Kept:learn(piece)
  local start = same_start(self.head or piece, piece)
  local stop = same_end(self.tail or piece, piece, math.min(#(self.tail or piece), #piece - start))
  if start + stop < LEAST or stop == 0 then
    self.head, self.tail = piece, piece
  else
    self.head, self.tail = sub(piece, 1, start), sub(piece, -stop)
  end
end

function Kept:close_run()
  if self.count > 0 then
    local middles = table.concat(self.middles, "\n", 1, self.count)
    self.records[#self.records + 1] = string.format("run %d %d %d\n", #self.head, #self.tail, #middles)
      .. self.head .. self.tail .. middles
    self.middles, self.count = {}, 0
  end
end

-- All that was kept, packed; from now on nothing is.
function Kept:take()
  self:close_run()
  local text = table.concat(self.records)
  self.records, self.bytes = {}, 0
  return text
end
