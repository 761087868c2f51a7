-- include lib
-- ARGV session_id fence mode ledger_line error_json retry(0/1) delay_seconds
-- An attempt failed in the machinery. mode 'worker': its worker says so. 'expired': the reaper, lease run out.
-- 'waiting': the reaper, the node is gone while the session waited there. Returns 'retry', 'postrun' or 'stale'.
local id, mode = ARGV[1], ARGV[3]
local state, lease = get(id, 'state'), redis.call('ZSCORE', ns .. ':leases', id)
if get(id, 'fence') ~= ARGV[2] then return 'stale' end
if mode == 'waiting' then
  if state ~= 'ADMITTED' and state ~= 'READY' then return 'stale' end
else
  if state ~= 'INITIALIZING' and state ~= 'RUNNING' then return 'stale' end
  if not lease then return 'stale' end
  if mode == 'expired' and tonumber(lease) > now then return 'stale' end
end
-- Whoever still believes to hold the session is fenced off from here on.
redis.call('HINCRBY', skey(id), 'fence', 1)
redis.call('ZREM', ns .. ':leases', id)
want_cleanup(id)
redis.call('HSET', skey(id), 'error', ARGV[5])
if ARGV[6] == '1' and get(id, 'cancel') ~= '1' then
  redis.call('RPUSH', skey(id) .. ':ledger', ARGV[4])
  free_places(id)
  event(id, 'RETRY', ARGV[5])
  enqueue(id, now + tonumber(ARGV[7]))
  ring()
  return 'retry'
end
redis.call('HSET', skey(id), 'termination', get(id, 'cancel') == '1' and 'cancelled' or 'infra_error')
to_postrun(id)
return 'postrun'
