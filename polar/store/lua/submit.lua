-- include lib
-- ARGV mode seconds (task_id blob priority results_queue backend callback n)…   All tasks or none.
-- mode 'managed': sessions wait for admission. 'capture': they are RUNNING at once, their lease is their deadline.
-- Returns '' or the id of a task that exists already.
local FIELDS = 7
for i = 3, #ARGV, FIELDS do
  if redis.call('EXISTS', ns .. ':task:' .. ARGV[i]) == 1 then return ARGV[i] end
end
for i = 3, #ARGV, FIELDS do
  local task, blob, priority, queue, backend, callback, n =
    ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], tonumber(ARGV[i + 6])
  local tkey = ns .. ':task:' .. task
  redis.call('HSET', tkey, 'spec', blob, 'created', stamp(), 'total', n, 'done', 0, 'rewarded', 0,
    'queue', queue, 'callback', callback, 'grouped', 0)
  redis.call('ZADD', ns .. ':tasks', now, task)
  local seq = redis.call('INCRBY', ns .. ':seq', n) - n
  for k = 0, n - 1 do
    local id = task .. '.s' .. k
    -- Lower goes first: priority 100 before 0, then the order of submission.
    local order = string.format('%.0f', (100 - priority) * 1e12 + seq + k)
    redis.call('HSET', skey(id), 'task', task, 'index', k, 'order', order, 'attempt', 0, 'fence', 0,
      'backend', backend, 'queue', queue, 'created', stamp(), 'node', '', 'mode', ARGV[1])
    redis.call('SADD', ns .. ':open', id)
    redis.call('RPUSH', tkey .. ':sessions', id)
    if ARGV[1] == 'capture' then
      redis.call('HSET', skey(id), 'attempt', 1, 'admitted', stamp(), 'run_started', stamp())
      next_fence(id)
      redis.call('ZADD', ns .. ':leases', now + tonumber(ARGV[2]), id)
      set_state(id, 'RUNNING', 'capture')
    else
      pend(id)
      set_state(id, 'PENDING')
    end
  end
end
if ARGV[1] ~= 'capture' then ring() end
return ''
