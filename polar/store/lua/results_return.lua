-- include results_lib
-- KEYS stream, failures, dead   ARGV group consumer entry_id idle_ms max_failures reason
-- Gives an entry back: it counts as idle for `idle_ms` already (negative: only from then on), so
-- that it comes again when its redelivery time is over.
-- max_failures 0: no failure is counted. Else, at that many failures, it moves to the dead list with its fields and the
-- reason. Returns 'again', 'dead', or 'gone' if it was not this consumer's any more.
local stream, group, id = KEYS[1], ARGV[1], ARGV[3]
local p = redis.call('XPENDING', stream, group, id, id, 1)
if not p[1] or p[1][2] ~= ARGV[2] then return 'gone' end
local max = tonumber(ARGV[5])
local failures = max > 0 and redis.call('HINCRBY', KEYS[2], id, 1) or 0
if max > 0 and failures >= max then
  local entry = redis.call('XRANGE', stream, id, id)
  local dead = {id = id, reason = ARGV[6], failures = failures, fields = {}}
  if entry[1] then
    for i = 1, #entry[1][2], 2 do dead.fields[entry[1][2][i]] = entry[1][2][i + 1] end
  end
  redis.call('RPUSH', KEYS[3], cjson.encode(dead))
  ack(stream, KEYS[2], group, id)
  return 'dead'
end
local idle = tonumber(ARGV[4])
if idle < 0 then
  redis.call('HSET', KEYS[2], 'from:' .. id, string.format('%.0f', now_ms - idle)) -- XCLAIM knows no such time
else
  redis.call('HDEL', KEYS[2], 'from:' .. id)
end
redis.call('XCLAIM', stream, group, ARGV[2], 0, id, 'IDLE', math.max(0, idle), 'JUSTID')
return 'again'
