-- include lib
-- ARGV postrun_limit node_timeout max   Gives up to `max` pending sessions to nodes with a free READY place, best session
-- first. Each back-end has its own queue: sessions that have no place stand in nobody's way, and what a call does is
-- bounded by `max`, however many wait. Returns a flat list session, node, …
local due = redis.call('ZRANGEBYSCORE', ns .. ':delayed', '-inf', now, 'LIMIT', 0, 1000)
for _, id in ipairs(due) do
  redis.call('ZREM', ns .. ':delayed', id)
  pend(id)
end
-- Before there was a queue for each back-end there was one: what an upgrade found in it.
for _, id in ipairs(redis.call('ZRANGE', ns .. ':pending', 0, 999)) do
  redis.call('ZREM', ns .. ':pending', id)
  if get(id, 'state') == 'PENDING' then pend(id) end
end
local out = {}
if redis.call('SCARD', ns .. ':postrun') >= tonumber(ARGV[1]) then return out end
local queues = {}
local function look(queue) -- at its first session
  local first = redis.call('ZRANGE', ns .. ':pending:' .. queue.backend, 0, 0, 'WITHSCORES')
  queue.id, queue.order = first[1], tonumber(first[2])
end
for _, backend in ipairs(redis.call('SMEMBERS', ns .. ':pending-backends')) do
  local queue = {backend = backend}
  look(queue)
  if queue.id then
    table.insert(queues, queue)
  else
    redis.call('SREM', ns .. ':pending-backends', backend)
  end
end
if #queues == 0 then return out end
local nodes = {}
for _, name in ipairs(redis.call('SMEMBERS', ns .. ':nodes')) do
  local key = ns .. ':node:' .. name
  local h = redis.call('HMGET', key, 'beat', 'ready', 'draining', 'backends', 'slots', 'init_failures', 'rests_until')
  if h[1] and now - tonumber(h[1]) < tonumber(ARGV[2]) and h[3] ~= '1' then
    local held = redis.call('SCARD', key .. ':ready')
    local trying = 0 -- sessions that are in INIT or go there: what counts where it fails
    for _, id in ipairs(h[6] and redis.call('SMEMBERS', key .. ':ready') or {}) do
      if get(id, 'state') ~= 'READY' then trying = trying + 1 end
    end
    table.insert(nodes, {
      name = name, trying = trying, free = tonumber(h[2]) - held, backends = ',' .. h[4] .. ',',
      used = held + redis.call('SCARD', key .. ':running'), slots = math.max(1, tonumber(h[5])),
      failing = h[6] and true or false, rests = tonumber(h[7] or '0') > now,
    })
  end
end
local function offers(n, backend) return string.find(n.backends, ',' .. backend .. ',', 1, true) end
for _, queue in ipairs(queues) do
  for _, n in ipairs(nodes) do
    if offers(n, queue.backend) and not n.failing then queue.sound = true end
  end
end
-- A node whose last INIT failed rests; then it tries one session at a time until one succeeds. Unless all are such.
local function kept_back(n, queue) return queue.sound and n.failing and (n.rests or n.trying > 0) end
local function better(a, b, failed_on)
  if (a.name == failed_on) ~= (b.name == failed_on) then return b.name == failed_on end
  local one, other = a.used / a.slots, b.used / b.slots
  return one < other or (one == other and a.free > b.free)
end
local function pick(queue)
  local failed_on, best = get(queue.id, 'failed_on'), nil
  for _, n in ipairs(nodes) do
    if n.free > 0 and offers(n, queue.backend) and not kept_back(n, queue) and (not best or better(n, best, failed_on)) then
      best = n
    end
  end
  return best
end
while #out < tonumber(ARGV[3]) * 2 do
  local queue = nil
  for _, q in ipairs(queues) do
    if q.id and (not queue or q.order < queue.order) then queue = q end
  end
  if not queue then break end
  local id, n = queue.id, pick(queue)
  if n then
    n.free, n.trying, n.used = n.free - 1, n.trying + 1, n.used + 1
    redis.call('ZREM', ns .. ':pending:' .. queue.backend, id)
    redis.call('HINCRBY', skey(id), 'attempt', 1)
    redis.call('HSET', skey(id), 'node', n.name, 'admitted', stamp())
    redis.call('SADD', ns .. ':node:' .. n.name .. ':ready', id)
    redis.call('ZADD', ns .. ':hints', now, id)
    set_state(id, 'ADMITTED', n.name)
    table.insert(out, id)
    table.insert(out, n.name)
    look(queue)
  else
    queue.id = nil -- no place for this one is none for those behind it
  end
end
return out
