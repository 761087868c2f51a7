-- include lib
-- ARGV session_id fence target (field value)…   INITIALIZING -> READY, RUNNING -> POSTRUN. Returns 1, or 0 if the
-- fence is old. A session whose cancel is wanted goes to POSTRUN instead of READY (returns 2). Safe to repeat after a lost
-- answer: whatever else ends the stage makes its fence old.
local id, target = ARGV[1], ARGV[3]
if get(id, 'fence') ~= ARGV[2] then return 0 end
local state = get(id, 'state')
if not redis.call('ZSCORE', ns .. ':leases', id) then
  if state == target then return 1 end
  return target == 'READY' and state == 'POSTRUN' and 2 or 0
end
if not ((target == 'READY' and state == 'INITIALIZING') or (target == 'POSTRUN' and state == 'RUNNING')) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', skey(id), ARGV[i], ARGV[i + 1]) end
if target == 'READY' then
  redis.call('HSET', skey(id), 'ready_at', stamp())
  redis.call('HDEL', ns .. ':node:' .. get(id, 'node'), 'init_failures', 'rests_until')
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
  if get(id, 'cancel') == '1' and get(id, 'termination') == 'infra_error' then
    redis.call('HSET', skey(id), 'termination', 'cancelled') -- as fail.lua says of it
  end
  to_postrun(id)
end
return 1
