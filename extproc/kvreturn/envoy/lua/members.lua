-- JSON that streams by without being kept: for what is too large, or is no JSON after all.
--
-- As kvreturn/core/strip.py: takes hidden members out of objects at depth 1 and 2. With `lines`, a line end begins
-- afresh, so what is broken in one line does not hide what is in the next.

local Members = {}
Members.__index = Members

local function members_stripper(lines)
  local ends = lines and "\r\n" or ""
  local self = setmetatable({ lines = lines, outside = '["{}%[%],' .. ends .. "]", inside = '["\\' .. ends .. "]" }, Members)
  self:reset()
  return self
end

function Members:reset()
  self.depth, self.stack, self.kept = 0, {}, {}
  self.in_string, self.escaped, self.naming, self.dropping = false, false, false, 0
  self.held = "" -- from a member's comma to the end of its name: nobody knows yet whether it stays
end

function Members:emit(out, text)
  if self.naming then
    self.held = self.held .. text
    if #self.held > LONGEST_NAME then
      self:keep(out)
    end
  elseif self.dropping == 0 then
    out[#out + 1] = text
  end
end

function Members:keep(out)
  out[#out + 1] = self.held
  self.held, self.naming = "", false
  if #self.kept > 0 then
    self.kept[#self.kept] = true
  end
end

function Members:step(out, c)
  if c == "\r" or c == "\n" then
    out[#out + 1] = self:flush() .. c
  elseif self.in_string then
    self:emit(out, c)
    if c == "\\" then
      self.escaped = true
      return
    end
    self.in_string = false
    if self.naming and HIDDEN[match(self.held, "^[, \t\r\n]*(.*)$")] then
      self.held, self.naming, self.dropping = "", false, self.depth
    elseif self.naming then
      self:keep(out)
    end
  elseif c == "{" or c == "[" then
    self:emit(out, c)
    self.depth = self.depth + 1
    if self.depth <= 2 then
      self.stack[self.depth], self.kept[self.depth] = c, false
      self.naming = self.naming or (c == "{" and self.dropping == 0)
    end
  elseif c == "}" or c == "]" then
    if self.naming then -- an empty object
      self:keep(out)
    end
    if self.dropping == self.depth then
      self.dropping = 0
    end
    if self.depth <= 2 then
      self.stack[self.depth], self.kept[self.depth] = nil, nil
    end
    self.depth = math.max(self.depth - 1, 0)
    self:emit(out, c)
  elseif c == "," and self.depth > 0 and self.depth <= 2 and self.stack[self.depth] == "{"
    and (self.dropping == 0 or self.dropping == self.depth) then
    -- The comma behind a removed member goes with it if nothing before it was kept.
    if self.kept[self.depth] or self.dropping == 0 then
      self.held = self.held .. c
    end
    self.dropping, self.naming = 0, true
  else
    self.in_string = c == '"'
    self:emit(out, c)
  end
end

function Members:decode(text)
  local out, at = {}, 1
  while at <= #text do
    if self.escaped and not (self.lines and find(text, "^[\r\n]", at)) then
      self.escaped = false
      self:emit(out, sub(text, at, at))
      at = at + 1
    else
      local i = find(text, self.in_string and self.inside or self.outside, at)
      self:emit(out, sub(text, at, (i or #text + 1) - 1))
      if i then
        self:step(out, sub(text, i, i))
      end
      at = (i or #text) + 1
    end
  end
  return table.concat(out)
end

function Members:flush()
  local held = self.held
  self:reset()
  return held
end

local function strip_text(text, lines)
  local stripper = members_stripper(lines)
  return stripper:decode(text) .. stripper:flush()
end
