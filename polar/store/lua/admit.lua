-- include lib
-- ARGV postrun_limit node_timeout max   Gives pending sessions to nodes with a free READY place, best session first.
-- Returns a flat list session, node, attempt, …
local due = redis.call('ZRANGEBYSCORE', ns .. ':delayed', '-inf', now)
for _, id in ipairs(due) do
  redis.call('ZREM', ns .. ':delayed', id)
  redis.call('ZADD', ns .. ':pending', get(id, 'order'), id)
end
local out = {}
if redis.call('SCARD', ns .. ':postrun') >= tonumber(ARGV[1]) then return out end
if redis.call('ZCARD', ns .. ':pending') == 0 then return out end
local nodes, free_total = {}, 0
for _, name in ipairs(redis.call('SMEMBERS', ns .. ':nodes')) do
  local h = redis.call('HMGET', ns .. ':node:' .. name, 'beat', 'ready', 'draining', 'backends')
  if h[1] and now - tonumber(h[1]) < tonumber(ARGV[2]) and h[3] ~= '1' then
    local free = tonumber(h[2]) - redis.call('SCARD', ns .. ':node:' .. name .. ':ready')
    local running = redis.call('SCARD', ns .. ':node:' .. name .. ':running')
    if free > 0 then
      free_total = free_total + free
      table.insert(nodes, {name = name, free = free, load = running, backends = ',' .. h[4] .. ','})
    end
  end
end
if free_total == 0 then return out end
-- A window, so that sessions whose back-end no node has can't block those behind them for ever.
for _, id in ipairs(redis.call('ZRANGE', ns .. ':pending', 0, 499)) do
  if free_total == 0 or #out >= tonumber(ARGV[3]) * 3 then break end
  local backend, best = get(id, 'backend'), nil
  for _, n in ipairs(nodes) do
    if n.free > 0 and string.find(n.backends, ',' .. backend .. ',', 1, true) then
      if not best or n.load < best.load or (n.load == best.load and n.free > best.free) then best = n end
    end
  end
  if best then
    best.free = best.free - 1
    best.load = best.load + 1
    free_total = free_total - 1
    redis.call('ZREM', ns .. ':pending', id)
    local attempt = redis.call('HINCRBY', skey(id), 'attempt', 1)
    redis.call('HSET', skey(id), 'node', best.name, 'admitted', stamp())
    redis.call('SADD', ns .. ':node:' .. best.name .. ':ready', id)
    redis.call('ZADD', ns .. ':hints', now, id)
    set_state(id, 'ADMITTED', best.name)
    table.insert(out, id)
    table.insert(out, best.name)
    table.insert(out, tostring(attempt))
  end
end
return out
