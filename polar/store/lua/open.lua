-- include lib
-- ARGV session_id seconds   A capture-only session starts as RUNNING, its lease is its deadline. Returns the fence.
local id = ARGV[1]
if get(id, 'mode') ~= 'capture' or get(id, 'state') ~= '' then return 0 end
redis.call('HSET', skey(id), 'attempt', 1, 'fence', 1, 'admitted', stamp(), 'run_started', stamp())
redis.call('ZADD', ns .. ':leases', now + tonumber(ARGV[2]), id)
set_state(id, 'RUNNING', 'capture')
return 1
