-- include lib
-- ARGV session_id stage node worker lease_seconds
-- The atomic start of a stage: without it no work is done. Returns {} or the session's fields (flat), fence included.
local id, stage, node = ARGV[1], ARGV[2], ARGV[3]
local state = get(id, 'state')
if stage == 'init' then
  if state ~= 'ADMITTED' or get(id, 'node') ~= node then return {} end
  redis.call('HSET', skey(id), 'init_started', stamp())
  set_state(id, 'INITIALIZING')
elseif stage == 'run' then
  if state ~= 'READY' or get(id, 'node') ~= node then return {} end
  redis.call('SREM', ns .. ':node:' .. node .. ':ready', id)
  redis.call('SADD', ns .. ':node:' .. node .. ':running', id)
  redis.call('HSET', skey(id), 'run_started', stamp())
  set_state(id, 'RUNNING')
elseif stage == 'postrun' then
  if state ~= 'POSTRUN' or redis.call('ZSCORE', ns .. ':leases', id) then return {} end
  redis.call('HSET', skey(id), 'postrun_started', stamp())
  redis.call('HINCRBY', skey(id), 'postrun_tries', 1)
  event(id, 'POSTRUN', 'started')
else
  return redis.error_reply('unknown stage')
end
next_fence(id)
redis.call('HSET', skey(id), 'worker', ARGV[4])
redis.call('ZREM', ns .. ':hints', id)
redis.call('ZADD', ns .. ':leases', now + tonumber(ARGV[5]), id)
return redis.call('HGETALL', skey(id))
