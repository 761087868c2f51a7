-- include results_lib
-- KEYS stream, failures   ARGV group consumer min_idle_ms cursor   XAUTOCLAIM of one entry, but none that was returned for
-- longer than that: {cursor, {entry?}}.
local min_idle = tonumber(ARGV[3])
local reply = redis.pcall('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', 1)
if reply.err then return reply end -- as it is: without a script's frame
local entry = reply[2][1]
local from = entry and redis.call('HGET', KEYS[2], 'from:' .. entry[1])
if not from then return reply end
local idle = now_ms - tonumber(from)
if idle < min_idle then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'IDLE', math.max(0, idle), 'JUSTID')
  return {reply[1], {}}
end
redis.call('HDEL', KEYS[2], 'from:' .. entry[1])
return reply
