-- Shared by every session script. KEYS[1] is the namespace; other keys are derived from it (no Redis Cluster: the
-- broker's transport has none either). Time is the server's, so the clocks of workers don't matter.
local ns = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local function stamp() return string.format('%.6f', now) end
local function skey(id) return ns .. ':session:' .. id end
local function get(id, f) return redis.call('HGET', skey(id), f) or '' end
-- Above every fence that the session ever had, also those that a failover lost: no two workers hold the same one.
local function next_fence(id)
  local fence = math.max(tonumber(get(id, 'fence')) + 1, clock[1] * 1000000 + clock[2])
  redis.call('HSET', skey(id), 'fence', string.format('%.0f', fence))
end
local function event(id, state, detail)
  redis.call('XADD', ns .. ':events', 'MAXLEN', '~', 20000, '*',
    'session', id, 'state', state, 'at', stamp(), 'detail', detail or '')
end
local function set_state(id, state, detail)
  redis.call('HSET', skey(id), 'state', state, 'since', stamp())
  event(id, state, detail)
end
local function ring()
  if redis.call('LLEN', ns .. ':doorbell') == 0 then redis.call('LPUSH', ns .. ':doorbell', '1') end
end
local function free_places(id)
  local node = get(id, 'node')
  if node ~= '' then
    redis.call('SREM', ns .. ':node:' .. node .. ':ready', id)
    redis.call('SREM', ns .. ':node:' .. node .. ':running', id)
  end
end
local function want_cleanup(id)
  local node = get(id, 'node')
  if node ~= '' then
    redis.call('ZADD', ns .. ':cleanup', now, node .. '|' .. id .. '.a' .. get(id, 'attempt'))
  end
end
local function to_postrun(id, detail)
  free_places(id)
  redis.call('ZREM', ns .. ':leases', id)
  redis.call('SADD', ns .. ':postrun', id)
  redis.call('ZADD', ns .. ':hints', now, id)
  set_state(id, 'POSTRUN', detail)
end
local function pend(id)
  local backend = get(id, 'backend')
  redis.call('SADD', ns .. ':pending-backends', backend)
  redis.call('ZADD', ns .. ':pending:' .. backend, get(id, 'order'), id)
end
local function enqueue(id, due)
  redis.call('ZREM', ns .. ':hints', id)
  redis.call('HSET', skey(id), 'node', '', 'sandbox', '')
  if due > now then
    redis.call('ZADD', ns .. ':delayed', due, id)
  else
    pend(id)
  end
  set_state(id, 'PENDING')
end
-- Asks for the end of a session. Returns its state before, or ''. A waiting session goes to POSTRUN at once; a worked-on
-- one is told by its lease renewal. Every cancelled session still gets its result.
local function cancel(id)
  local state = get(id, 'state')
  if state == '' or state == 'DONE' then return state end
  redis.call('HSET', skey(id), 'cancel', '1')
  if state == 'PENDING' or state == 'ADMITTED' or state == 'READY' then
    redis.call('ZREM', ns .. ':pending:' .. get(id, 'backend'), id)
    redis.call('ZREM', ns .. ':delayed', id)
    next_fence(id)
    redis.call('HSET', skey(id), 'termination', 'cancelled')
    if state ~= 'PENDING' then want_cleanup(id) end
    to_postrun(id, 'cancelled')
  elseif state == 'RUNNING' and get(id, 'mode') == 'capture' then
    redis.call('HSET', skey(id), 'termination', 'cancelled', 'run_ended', stamp())
    to_postrun(id, 'cancelled')
  end
  return state
end
