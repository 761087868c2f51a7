-- Shared by the scripts of the results streams. `failures` is a hash: id -> failures, and from:<id> -> the Unix time in ms
-- from which a returned entry counts as idle, if that is yet to come.
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
-- Acknowledge for one group; the entry goes once every group of the stream has read and acknowledged it.
local function ack(stream, failures, group, id)
  local acked = redis.call('XACK', stream, group, id)
  redis.call('HDEL', failures, id, 'from:' .. id)
  local ms, seq = parts(id)
  for _, g in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local last_ms, last_seq = parts(field(g, 'last-delivered-id'))
    if last_ms < ms or (last_ms == ms and last_seq < seq) then return acked end
    if #redis.call('XPENDING', stream, field(g, 'name'), id, id, 1) > 0 then return acked end
  end
  redis.call('XDEL', stream, id)
  return acked
end
