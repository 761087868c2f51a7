-- include lib
-- ARGV task_id blob priority results_queue backend callback mode n(session ids…)   Returns 1, or 0 if the task exists.
local task, tkey = ARGV[1], ns .. ':task:' .. ARGV[1]
local n = #ARGV - 7
if redis.call('EXISTS', tkey) == 1 then return 0 end
redis.call('HSET', tkey, 'spec', ARGV[2], 'created', stamp(), 'total', n, 'done', 0, 'rewarded', 0,
  'queue', ARGV[4], 'callback', ARGV[6], 'grouped', 0)
redis.call('ZADD', ns .. ':tasks', now, task)
local seq = redis.call('INCRBY', ns .. ':seq', n) - n
for i = 1, n do
  local id = ARGV[7 + i]
  -- Lower goes first: priority 100 before 0, then the order of submission.
  local order = (100 - tonumber(ARGV[3])) * 1e12 + seq + i
  redis.call('HSET', skey(id), 'task', task, 'index', i - 1, 'order', string.format('%.0f', order),
    'attempt', 0, 'fence', 0, 'backend', ARGV[5], 'queue', ARGV[4], 'created', stamp(), 'node', '', 'mode', ARGV[7])
  redis.call('SADD', ns .. ':open', id)
  redis.call('RPUSH', tkey .. ':sessions', id)
  if ARGV[7] == 'managed' then
    redis.call('ZADD', ns .. ':pending', string.format('%.0f', order), id)
    set_state(id, 'PENDING')
  end
end
if ARGV[7] == 'managed' then ring() end
return 1
