-- include lib
-- ARGV session_id fence target (field value)…   INITIALIZING -> READY, RUNNING -> POSTRUN. Returns 1, or 0 if the
-- fence is old. A session whose cancel is wanted goes to POSTRUN instead of READY (returns 2).
local id, target = ARGV[1], ARGV[3]
if get(id, 'fence') ~= ARGV[2] or not redis.call('ZSCORE', ns .. ':leases', id) then return 0 end
local state = get(id, 'state')
if not ((target == 'READY' and state == 'INITIALIZING') or (target == 'POSTRUN' and state == 'RUNNING')) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', skey(id), ARGV[i], ARGV[i + 1]) end
if target == 'READY' then
  redis.call('HSET', skey(id), 'ready_at', stamp())
  if get(id, 'cancel') == '1' then
    redis.call('HSET', skey(id), 'termination', 'cancelled')
    want_cleanup(id)
    to_postrun(id)
    return 2
  end
  redis.call('ZREM', ns .. ':leases', id)
  redis.call('ZADD', ns .. ':hints', now, id)
  set_state(id, 'READY')
else
  redis.call('HSET', skey(id), 'run_ended', stamp())
  to_postrun(id)
end
return 1
