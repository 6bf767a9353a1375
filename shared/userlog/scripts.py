"""The Lua scripts of the user log: each touches one user, so each runs in one step and in one cluster slot.

The log of a user is a list: an element of meta data, then blocks of compact columns (see ``blocks``), ordered by
(timestamp, arrival) within and among themselves. An append adds to the columns of the newest block; an event that comes
late rewrites the block where it belongs. A log may outgrow ``keep`` by less than its oldest block, which goes when the
others hold enough: what lies before the newest ``keep`` is never shown.

The meta data are the format's version and the number of events; then how many blocks went so far, the epoch, and how
many events went, whatever became of the epoch: with it a reader knows an event's place among all that its user did, and
so which events stand at the beginning of a window.

A block keeps its number, its place plus those that went, as long as the epoch is the same: between two moments of one
epoch the newest block grew, newer ones came and the oldest went, nothing else. So a long log is read in several trips,
each going on below the number where the last one ended. A late event begins another epoch, and so does a log that is
made after a deletion: an epoch is a time in microseconds.

A log of the release before (one string of 28-byte records, key ``log1``) is taken over when its user is first touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from shared.userlog.blocks import FORMAT_VERSION, HEADER_BYTES, HEADER_LUA
from shared.userlog.records import RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest by which the server knows it.

    Args:
        text: Source.
        sha: Hex SHA-1 of the source.
    """

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


_CONSTANTS = f"""
local R, H, VERSION, HEADER = {RECORD_BYTES}, {HEADER_BYTES}, {FORMAT_VERSION}, '{HEADER_LUA}'
local META, META_BYTES, META_BYTES_BEFORE = '<BI4I4i8i8', 25, 17

local function new_epoch(old)
  local now = redis.call('TIME')
  return math.max(now[1] * 1000000 + now[2], old + 1)
end
"""

_CODEC = """
local sub, find, byte, char, rep = string.sub, string.find, string.byte, string.char, string.rep
local floor, concat, pack, unpack_struct = math.floor, table.concat, struct.pack, struct.unpack

-- A varint of up to 64 bits, given as two halves of 32: a Lua number holds 53.
local function varint(low, high)
  if high == 0 and low < 128 then return char(low) end
  local out = {}
  while high > 0 or low > 127 do
    out[#out + 1] = char(low % 128 + 128)
    low = floor(low / 128) + (high % 128) * 33554432
    high = floor(high / 128)
  end
  out[#out + 1] = char(low)
  return concat(out)
end

-- Value (exact to 2^53, enough for times) and the position after it.
local function read_varint(text, at)
  local value, scale = 0, 1
  while true do
    local digit = byte(text, at)
    at = at + 1
    if digit < 128 then return value + digit * scale, at end
    value, scale = value + (digit - 128) * scale, scale * 128
  end
end

-- 48 bits of the 64-bit key of an event id; the upper 16 are folded in.
local function fingerprint(record)
  local b1, b2 = byte(record, 1, 2)
  local b7, b8 = byte(record, 7, 8)
  return char(bit.bxor(b1, b7), bit.bxor(b2, b8)) .. sub(record, 3, 6)
end

-- Half points are an even code, anything else the bits of the float and an odd one.
local function weight_code(record)
  local halves = unpack_struct('<f', record, 25) * 2
  if halves >= 0 and halves == floor(halves) and halves < 1048576 then return varint(halves * 2, 0) end
  local bits = unpack_struct('<I4', record, 25)
  return varint(bits * 2 % 4294967296 + 1, floor(bits / 2147483648))
end

local function entry(record)
  local low, high = unpack_struct('<I4I4', record, 17)
  return {
    time = unpack_struct('<i8', record, 9), id = fingerprint(record), item = varint(low, high),
    weight = weight_code(record), source = byte(record, 29),
  }
end

local function header(block)
  local damaged = #block < H
  local head
  if not damaged then
    local _, source, count, first, last, times, items, weights, sources = unpack_struct(HEADER, block)
    head = {source = source, count = count, first = first, last = last,
            times = times, items = items, weights = weights, sources = sources}
    damaged = count == 0 or #block ~= H + 6 * count + times + items + weights + sources
  end
  if damaged then error('user log is damaged: a block of ' .. #block .. ' bytes') end
  return head
end

local function decode(block)
  local head = header(block)
  local times = H + 6 * head.count + 1
  local item = times + head.times
  local weight = item + head.items
  local source = weight + head.weights
  local time, entries = head.first, {}
  for i = 1, head.count do
    if i > 1 then
      local gap
      gap, times = read_varint(block, times)
      time = time + gap
    end
    local item_end, weight_end = find(block, '[%z\\1-\\127]', item), find(block, '[%z\\1-\\127]', weight)
    entries[i] = {
      time = time, id = sub(block, H + 6 * i - 5, H + 6 * i), item = sub(block, item, item_end),
      weight = sub(block, weight, weight_end),
      source = head.sources > 0 and byte(block, source + i - 1) or head.source,
    }
    item, weight = item_end + 1, weight_end + 1
  end
  return entries
end

local function gap_code(gap) return varint(gap % 4294967296, floor(gap / 4294967296)) end

local function encode(entries, from, to)
  local ids, gaps, items, weights, sources, mixed = {}, {}, {}, {}, {}, false
  for i = from, to do
    local one = entries[i]
    ids[#ids + 1], items[#items + 1], weights[#weights + 1] = one.id, one.item, one.weight
    sources[#sources + 1] = char(one.source)
    if i > from then
      gaps[#gaps + 1] = gap_code(one.time - entries[i - 1].time)
      mixed = mixed or one.source ~= entries[from].source
    end
  end
  local gap, item, weight = concat(gaps), concat(items), concat(weights)
  local source = mixed and concat(sources) or ''
  local head = pack(HEADER, VERSION, entries[from].source, to - from + 1, entries[from].time, entries[to].time,
                    #gap, #item, #weight, #source)
  return head .. concat(ids) .. gap .. item .. weight .. source
end

-- One newer event at the end of a block, without decoding it.
local function extended(block, one)
  local head = header(block)
  local times = H + 6 * head.count
  local items = times + head.times
  local weights = items + head.items
  local sources = weights + head.weights
  local gap, source = gap_code(one.time - head.last), sub(block, sources + 1)
  if one.source ~= head.source and source == '' then source = rep(char(head.source), head.count) end
  if source ~= '' then source = source .. char(one.source) end
  return pack(HEADER, VERSION, head.source, head.count + 1, head.first, one.time, head.times + #gap,
              head.items + #one.item, head.weights + #one.weight, #source)
    .. sub(block, H + 1, times) .. one.id .. sub(block, times + 1, items) .. gap
    .. sub(block, items + 1, weights) .. one.item .. sub(block, weights + 1, sources) .. one.weight .. source
end

-- Events, blocks that went, epoch, events that went; 0 for the last two where a release wrote that knew of none.
local function meta_of(text)
  local version, total = unpack_struct('<BI4', text)
  if version ~= VERSION then
    error('user log has format ' .. version .. ', this release reads ' .. VERSION)
  end
  if #text < META_BYTES_BEFORE then return total, 0, 0, 0 end
  if #text < META_BYTES then text = text .. rep('\\0', 8) end
  local _, _, gone, epoch, went = unpack_struct(META, text)
  return total, gone, epoch, went
end
"""

_ADD = """
-- Events of a block, without reading the rest of its header.
local function count_of(block)
  if #block < H then header(block) end
  local low, high = byte(block, 3, 4)
  return low + 256 * high
end

-- Which ids the newest `keep` events of the log have: a function of an id. Few are searched for in the blocks as they
-- are: to copy the ids of a long log, or to read all its headers, takes longer than to search it.
local function knowledge(blocks, hidden, num_new)
  if num_new <= 4 then
    return function(id)
      for number, block in ipairs(blocks) do
        local first = H + 6 * (number == 1 and hidden or 0) + 1
        local last = H + 6 * count_of(block) - 5
        local at = find(block, id, first, true)
        while at and at <= last do
          if (at - H) % 6 == 1 then return true end
          at = find(block, id, at + 1, true)
        end
      end
    end
  end
  local texts = {}
  for number, block in ipairs(blocks) do
    texts[number] = sub(block, H + 6 * (number == 1 and hidden or 0) + 1, H + 6 * count_of(block))
  end
  local text = concat(texts)  -- a search in one long text costs less than many in short ones
  if num_new > 256 then  -- many: one table of all ids, or the cost would be their product
    local ids = {}
    for at = 1, #text, 6 do ids[sub(text, at, at + 5)] = true end
    return function(id) return ids[id] end
  end
  return function(id)
    local at = find(text, id, 1, true)
    while at and at % 6 ~= 1 do at = find(text, id, at + 1, true) end
    return at
  end
end

-- Time of one event of a block, without decoding the others.
local function time_at(block, place)
  local head = header(block)
  local time, at = head.first, H + 6 * head.count + 1
  for _ = 2, place do
    local gap
    gap, at = read_varint(block, at)
    time = time + gap
  end
  return time
end

-- Puts late events into the block where they belong; an equal time that is there already came first. At most `most`
-- blocks are rewritten: events of further ones are left. Returns the blocks; the numbers of those that changed, or none
-- where one was split and all have other numbers; how many events were put.
local function insert_late(blocks, added, size, most)
  local places, result, changed, num_places, num_put = {}, {}, {}, 0, 0
  for _, one in ipairs(added) do
    local number = #blocks
    while number > 1 and header(blocks[number]).first > one.time do number = number - 1 end
    if not places[number] then
      if num_places == most then break end
      places[number], num_places = {}, num_places + 1
    end
    table.insert(places[number], one)
    num_put = num_put + 1
  end
  for number, block in ipairs(blocks) do
    if not places[number] then
      result[#result + 1] = block
    else
      local merged, i, old = {}, 1, decode(block)
      for _, one in ipairs(places[number]) do
        while i <= #old and old[i].time <= one.time do
          merged[#merged + 1] = old[i]
          i = i + 1
        end
        merged[#merged + 1] = one
      end
      for j = i, #old do merged[#merged + 1] = old[j] end
      local piece = #merged > 2 * size and size or #merged
      for from = 1, #merged, piece do
        result[#result + 1] = encode(merged, from, math.min(from + piece - 1, #merged))
      end
      changed[#changed + 1] = number
    end
  end
  return result, #result == #blocks and changed or nil, num_put
end

-- Drops the oldest blocks that the newest `keep` events do not need; returns how many events are left.
local function trim(blocks, total, keep)
  while #blocks > 1 do
    local count = header(blocks[1]).count
    if total - count < keep then break end
    table.remove(blocks, 1)
    total = total - count
  end
  return total
end

-- Adds records of one user, distinct and ordered by time. Returns what became of each: a appended, d there already,
-- x too old for a full log, r left for another step.
local function add(key, records, keep, size, most)
  local num_new = #records / R
  if num_new % 1 ~= 0 then error('user log is damaged: ' .. #records .. ' bytes of records') end
  local blocks = redis.call('LRANGE', key, 0, -1)
  local is_new, total, gone, epoch, went = #blocks == 0, 0, 0, 0, 0
  if not is_new then total, gone, epoch, went = meta_of(table.remove(blocks, 1)) end
  local num_stored = #blocks
  went = went + total
  total = trim(blocks, total, keep)  -- more than a block is left over where `keep` was larger before
  local num_cut = num_stored - #blocks
  local hidden = math.max(0, total - keep)
  local known = knowledge(blocks, hidden, num_new)
  -- In a full log an event must be newer than the oldest one: else an event that was cut would come back when it is
  -- sent again, and push out another.
  local oldest = total >= keep and time_at(blocks[1], hidden + 1)
  local added, fates = {}, {}
  for i = 0, num_new - 1 do
    local one = entry(sub(records, i * R + 1, (i + 1) * R))
    local fate = known(one.id) and 'd' or (oldest and one.time <= oldest and 'x') or 'a'
    if fate == 'a' then added[#added + 1] = one end
    fates[#fates + 1] = fate
  end
  if #added == 0 then return concat(fates) end
  local num_kept, changed, num_put = #blocks, {}, #added
  if num_kept > 0 and header(blocks[num_kept]).last > added[1].time then
    blocks, changed, num_put = insert_late(blocks, added, size, most)
    epoch = new_epoch(epoch)
    local num_left = #added - num_put
    for i = #fates, 1, -1 do
      if num_left == 0 then break end
      if fates[i] == 'a' then fates[i], num_left = 'r', num_left - 1 end
    end
  else
    local next = 1
    while num_kept > 0 and next <= #added and header(blocks[num_kept]).count < size do
      blocks[num_kept] = extended(blocks[num_kept], added[next])
      next, changed[1] = next + 1, num_kept
    end
    for from = next, #added, size do
      blocks[#blocks + 1] = encode(added, from, math.min(from + size - 1, #added))
    end
    if epoch == 0 then epoch = new_epoch(0) end
  end
  if is_new or not changed then  -- written anew; an empty place for the meta data
    redis.call('DEL', key)
    redis.call('RPUSH', key, '')
    num_kept, num_cut, changed = 0, 0, {}
  end
  for _, number in ipairs(changed) do redis.call('LSET', key, num_cut + number, blocks[number]) end
  for number = num_kept + 1, #blocks do redis.call('RPUSH', key, blocks[number]) end
  local num_blocks = #blocks
  total = trim(blocks, total + num_put, keep)
  num_cut = num_cut + num_blocks - #blocks
  if num_cut > 0 then redis.call('LTRIM', key, num_cut, -1) end  -- the last that goes gives its place to the meta data
  went = went + num_put - total
  redis.call('LSET', key, 0, pack(META, VERSION, total, gone + num_cut, epoch, went))
  return concat(fates)
end

-- Takes over a log of 28-byte records: the same record without a source.
local function adopt(key, old_key, keep, size)
  local old = redis.call('GET', old_key)
  if not old then return end
  if #old % 28 ~= 0 then error('user log is damaged: ' .. #old .. ' bytes') end
  local records = {}
  for at = 1, #old, 28 do records[#records + 1] = sub(old, at, at + 27) .. '\\0' end
  add(key, concat(records), keep, size, 1)
  redis.call('DEL', old_key)
end
"""

# KEYS: log, log of the release before, profile. ARGV: records of one user, distinct and ordered by timestamp; keep;
# events of a block; time to live in seconds, 0 for ever; blocks that may be rewritten for late events. Returns what
# became of each record, one letter each.
APPEND: Final = Script(
    _CONSTANTS
    + _CODEC
    + _ADD
    + """
local keep, size, ttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
adopt(KEYS[1], KEYS[2], keep, size)
local fates = add(KEYS[1], ARGV[1], keep, size, tonumber(ARGV[5]))
if ttl > 0 then
  redis.call('EXPIRE', KEYS[1], ttl)
  redis.call('EXPIRE', KEYS[3], ttl)
end
return fates
"""
)

# KEYS: log, log of the release before, profile. ARGV: time to live as above, number of events, blocks. Returns 1 when
# they were put into an empty log; 0, and nothing done, when there is a log.
LOAD: Final = Script(
    _CONSTANTS
    + """
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return 0 end
redis.call('RPUSH', KEYS[1], struct.pack(META, VERSION, tonumber(ARGV[2]), 0, new_epoch(0), 0))
for i = 3, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
if tonumber(ARGV[1]) > 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return 1
"""
)

# KEYS: log, log of the release before, profile. ARGV: before_s; limit; keep; events of a block; events after which a
# trip ends; epoch, and number of the oldest block that the trip before looked at (0 and 0: the first trip). Returns, as
# one msgpack array (a reply of many elements takes the client longer than the round trip):
#   all events of the log; those of newer blocks that are not before the time; blocks that hold the newest `limit`
#   before it, oldest first, as one string; how many events they have, a block that straddles the time apart; in the
#   first trip the profile; how many blocks went; epoch; number of the oldest block looked at where older ones are
#   wanted, 0 where none are, -1 where the log is no longer the one of the trip before.
READ: Final = Script(
    _CONSTANTS
    + _CODEC
    + _ADD
    + """
local before, limit, keep, page = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local old_epoch, below = tonumber(ARGV[6]), tonumber(ARGV[7])
local is_first, profile = below == 0, {}
if is_first then
  adopt(KEYS[1], KEYS[2], keep, tonumber(ARGV[4]))
  profile = redis.call('HGETALL', KEYS[3])
end
local meta = redis.call('LINDEX', KEYS[1], 0)
if not meta then return cmsgpack.pack({0, 0, '', 0, profile, 0, 0, is_first and 0 or -1, 0}) end
local total, gone, epoch, went = meta_of(meta)
if not is_first and epoch ~= old_epoch then return cmsgpack.pack({0, 0, '', 0, profile, 0, 0, -1, 0}) end
if epoch == 0 then page = total end  -- its blocks have no numbers: in one trip
local at = is_first and redis.call('LLEN', KEYS[1]) - 1 or below - gone - 1  -- 0 or less: what was to be read went
local later, found, taken, blocks, done = 0, 0, 0, {}, false
while at > 0 and not done and taken < page do
  -- As many as are likely wanted: a call costs more than a block, and a block that is not wanted its copy.
  local num = math.min(math.max(floor(math.min(limit - found, page - taken) / tonumber(ARGV[4])), 0) + 2, 32)
  local slice = redis.call('LRANGE', KEYS[1], math.max(at - num + 1, 1), at)
  for i = #slice, 1, -1 do
    local block = slice[i]
    local head = header(block)
    if head.first >= before then
      later = later + head.count
    elseif head.last >= before or found < limit then
      blocks[#blocks + 1], taken = block, taken + head.count
      if head.last < before then found = found + head.count end
      done = found >= limit
    else
      done = true
    end
    at = at - 1
    if done or taken >= page then break end
  end
end
-- Newest first so far: to insert each in front would move all others, blocks squared for a long history.
local oldest_first = {}
for i = #blocks, 1, -1 do oldest_first[#oldest_first + 1] = blocks[i] end
local next = at > 0 and not done and gone + at + 1 or 0
return cmsgpack.pack({total, later, concat(oldest_first), found, profile, gone, epoch, next, went})
"""
)
