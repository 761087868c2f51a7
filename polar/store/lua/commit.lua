-- include lib
-- ARGV session_id fence result_key termination verdict reward ledger_line group_mode group_k
-- First terminal state wins. Counts the task, appends to the results stream, closes the session: all or nothing.
-- Returns {1, task done (0/1), group complete (0/1)} or {0}.
local id = ARGV[1]
if get(id, 'state') ~= 'POSTRUN' or get(id, 'fence') ~= ARGV[2] then return {0} end
if not redis.call('ZSCORE', ns .. ':leases', id) then return {0} end
local task, queue = get(id, 'task'), get(id, 'queue')
local tkey = ns .. ':task:' .. task
redis.call('HSET', skey(id), 'result', ARGV[3], 'termination', ARGV[4], 'verdict', ARGV[5], 'reward', ARGV[6],
  'done_at', stamp())
redis.call('HDEL', skey(id), 'run_report', 'sandbox') -- the result has what counts of them
redis.call('RPUSH', skey(id) .. ':ledger', ARGV[7])
redis.call('ZREM', ns .. ':leases', id)
redis.call('ZREM', ns .. ':hints', id)
redis.call('SREM', ns .. ':postrun', id)
redis.call('SREM', ns .. ':open', id)
set_state(id, 'DONE', ARGV[4] .. '/' .. ARGV[5])
redis.call('HINCRBY', ns .. ':done', 'termination:' .. ARGV[4], 1)
redis.call('HINCRBY', ns .. ':done', 'verdict:' .. ARGV[5], 1)
redis.call('XADD', ns .. ':results:' .. queue, '*', 'session', id, 'task', task, 'key', ARGV[3],
  'termination', ARGV[4], 'verdict', ARGV[5], 'reward', ARGV[6])
local done = redis.call('HINCRBY', tkey, 'done', 1)
local rewarded = tonumber(redis.call('HGET', tkey, 'rewarded'))
if ARGV[6] ~= '' then rewarded = redis.call('HINCRBY', tkey, 'rewarded', 1) end
local total = tonumber(redis.call('HGET', tkey, 'total'))
local all = done >= total
local group = all or (ARGV[8] == 'min_k' and rewarded >= tonumber(ARGV[9]))
if group and redis.call('HGET', tkey, 'grouped') == '0' then
  redis.call('HSET', tkey, 'grouped', 1)
  redis.call('XADD', ns .. ':groups:' .. queue, '*', 'task', task)
else
  group = false
end
if all then
  redis.call('HSET', tkey, 'finished', stamp())
  local callback = redis.call('HGET', tkey, 'callback')
  if callback and callback ~= '' then redis.call('XADD', ns .. ':callbacks', '*', 'task', task) end
end
return {1, all and 1 or 0, group and 1 or 0}
