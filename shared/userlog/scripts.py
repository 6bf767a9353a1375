"""The two Lua scripts of the user log: each touches one user, so each runs in one step and in one cluster slot.

The log of a user is one string of 28-byte records (see ``records``), ordered by (timestamp, arrival). It may grow
``slack`` events over ``keep`` before it is cut: cutting writes the whole string (and the whole string into the
append-only file), so it is done once in ``slack`` appends. What lies before the newest ``keep`` is never shown.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

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


# KEYS: log. ARGV: records of one user, distinct and ordered by timestamp; keep; slack.
# Returns appended, duplicates, expired.
APPEND: Final = Script(
    f"local R = {RECORD_BYTES}"
    """
local log = redis.call('GET', KEYS[1]) or ''
local new, keep, slack = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local sub, find = string.sub, string.find
local num_old, num_new = #log / R, #new / R
if num_old % 1 ~= 0 or num_new % 1 ~= 0 then
  return redis.error_reply('user log is damaged: ' .. #log .. ' bytes')
end
if sub(log, 1, #new) == new then return {0, num_new, 0} end  -- the same history loaded again
if num_old == 0 then  -- a first load: nothing to compare with
  redis.call('SET', KEYS[1], sub(new, math.max(0, num_new - keep) * R + 1))
  return {num_new, 0, 0}
end
local hidden = math.max(0, num_old - keep)
local function time_at(records, i) return (struct.unpack('<i8', records, i * R + 9)) end

-- Few events: search the string for each. Many: one table of all ids, or the cost would be their product.
local known
if num_new > 8 then
  local ids = {}
  for i = hidden, num_old - 1 do ids[sub(log, i * R + 1, i * R + 8)] = true end
  known = function(id) return ids[id] end
else
  known = function(id)
    local at = find(log, id, hidden * R + 1, true)
    while at and (at - 1) % R ~= 0 do at = find(log, id, at + 1, true) end
    return at
  end
end

-- In a full log an event must be newer than the oldest one: else an event that was cut would come back when it is sent
-- again, and push out another.
local oldest = num_old >= keep and time_at(log, hidden)
local added, duplicates, expired = {}, 0, 0
for i = 0, num_new - 1 do
  local record = sub(new, i * R + 1, (i + 1) * R)
  if known(sub(record, 1, 8)) then
    duplicates = duplicates + 1
  elseif oldest and time_at(record, 0) <= oldest then
    expired = expired + 1
  else
    added[#added + 1] = record
  end
end
if #added == 0 then return {0, duplicates, expired} end

-- Merge: everything before position `at` stays; an equal time that is there already came first.
local first_time = time_at(added[1], 0)
local at = num_old
if time_at(log, num_old - 1) > first_time then
  local low = 0
  while low < at do
    local middle = math.floor((low + at) / 2)
    if time_at(log, middle) > first_time then at = middle else low = middle + 1 end
  end
end
local merged, i = {}, at
for _, record in ipairs(added) do
  local time = time_at(record, 0)
  while i < num_old and time_at(log, i) <= time do
    merged[#merged + 1] = sub(log, i * R + 1, (i + 1) * R)
    i = i + 1
  end
  merged[#merged + 1] = record
end
local tail = table.concat(merged) .. sub(log, i * R + 1)

local total = num_old + #added
if total > keep + slack then
  redis.call('SET', KEYS[1], sub(sub(log, 1, at * R) .. tail, (total - keep) * R + 1))
elseif at == num_old then
  redis.call('APPEND', KEYS[1], tail)
else
  redis.call('SETRANGE', KEYS[1], at * R, tail)
end
return {#added, duplicates, expired}
"""
)

# KEYS: log, profile. ARGV: before_s, limit, keep. Returns records, number of events before that time, profile.
READ: Final = Script(
    f"local R = {RECORD_BYTES}"
    """
local before, limit, keep = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local total = redis.call('STRLEN', KEYS[1]) / R
if total % 1 ~= 0 then return redis.error_reply('user log is damaged: ' .. total * R .. ' bytes') end
local start = math.max(0, total - keep)
local function time_at(i)
  return (struct.unpack('<i8', redis.call('GETRANGE', KEYS[1], i * R + 8, i * R + 15)))
end
local stop = total
if total > start and time_at(total - 1) >= before then
  local low = start
  stop = total - 1
  while low < stop do
    local middle = math.floor((low + stop) / 2)
    if time_at(middle) >= before then stop = middle else low = middle + 1 end
  end
end
local take = math.min(limit, stop - start)
local records = ''
if take > 0 then records = redis.call('GETRANGE', KEYS[1], (stop - take) * R, stop * R - 1) end
return {records, stop - start, redis.call('HGETALL', KEYS[2])}
"""
)
