-- include lib
-- ARGV session_id fence mode   Ends a POSTRUN lease without a result, so that the session is taken up again.
-- mode 'worker': for an outage or the worker's end, which counts as no try; 'failed': for a bug, which does; 'expired'
-- needs a lease that ran out. Capture-only sessions past their deadline go on to POSTRUN here. Returns 1 or 0.
local id = ARGV[1]
local lease = redis.call('ZSCORE', ns .. ':leases', id)
if not lease or get(id, 'fence') ~= ARGV[2] then return 0 end
if ARGV[3] == 'expired' and tonumber(lease) > now then return 0 end
if get(id, 'state') == 'RUNNING' and get(id, 'mode') == 'capture' then
  redis.call('HSET', skey(id), 'termination', 'agent_timeout', 'run_ended', stamp())
  to_postrun(id)
  return 1
end
if get(id, 'state') ~= 'POSTRUN' then return 0 end
-- Not below 1: only a session that no POSTRUN has begun yet may find itself in its first.
if ARGV[3] == 'worker' and tonumber(get(id, 'postrun_tries')) > 1 then
  redis.call('HINCRBY', skey(id), 'postrun_tries', -1)
end
next_fence(id)
redis.call('ZREM', ns .. ':leases', id)
redis.call('ZADD', ns .. ':hints', now, id)
return 1
