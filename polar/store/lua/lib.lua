-- Shared by every session script. KEYS[1] is the namespace; other keys are derived from it (no Redis Cluster: the
-- broker's transport has none either). Time is the server's, so the clocks of workers don't matter.
local ns = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local function stamp() return string.format('%.6f', now) end
local function skey(id) return ns .. ':session:' .. id end
local function get(id, f) return redis.call('HGET', skey(id), f) or '' end
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
local function enqueue(id, due)
  redis.call('ZREM', ns .. ':hints', id)
  redis.call('HSET', skey(id), 'node', '', 'sandbox', '')
  if due > now then
    redis.call('ZADD', ns .. ':delayed', due, id)
  else
    redis.call('ZADD', ns .. ':pending', get(id, 'order'), id)
  end
  set_state(id, 'PENDING')
end
