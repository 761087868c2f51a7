-- include lib
-- ARGV session_id fence result_key termination verdict reward ledger_line group_mode group_k cancel_rest(0/1)
-- First terminal state wins. Counts the task, appends to the results stream, closes the session: all or nothing.
-- With cancel_rest, completing a `min_k` group cancels the other sessions. Returns {0}, or {1, session…}: those of them
-- that wait for POSTRUN from now on.
local id = ARGV[1]
if get(id, 'fence') ~= ARGV[2] then return {0} end
-- Said again, after a lost answer: the others are announced by the reaper.
if get(id, 'state') == 'DONE' and get(id, 'result') == ARGV[3] then return {1} end
if get(id, 'state') ~= 'POSTRUN' or not redis.call('ZSCORE', ns .. ':leases', id) then return {0} end
local task, queue = get(id, 'task'), get(id, 'queue')
local tkey = ns .. ':task:' .. task
redis.call('HSET', skey(id), 'result', ARGV[3], 'termination', ARGV[4], 'verdict', ARGV[5], 'reward', ARGV[6],
  'done_at', stamp())
redis.call('HDEL', skey(id), 'run_report', 'sandbox') -- the result has what counts of them
-- The attempt has its line if it failed, and the session was cancelled before another one began.
local last = redis.call('LINDEX', skey(id) .. ':ledger', -1)
if not last or cjson.decode(last).attempt ~= tonumber(get(id, 'attempt')) then
  redis.call('RPUSH', skey(id) .. ':ledger', ARGV[7])
end
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
local out = {1}
local group = all or (ARGV[8] == 'min_k' and rewarded >= tonumber(ARGV[9]))
if group and redis.call('HGET', tkey, 'grouped') == '0' then
  redis.call('HSET', tkey, 'grouped', 1)
  redis.call('XADD', ns .. ':groups:' .. queue, '*', 'task', task)
  local others = ARGV[10] == '1' and redis.call('LRANGE', tkey .. ':sessions', 0, -1) or {}
  for _, other in ipairs(others) do
    if cancel(other) ~= 'POSTRUN' and get(other, 'state') == 'POSTRUN' then table.insert(out, other) end
  end
end
if all then
  redis.call('HSET', tkey, 'finished', stamp())
  local callback = redis.call('HGET', tkey, 'callback')
  if callback and callback ~= '' then redis.call('XADD', ns .. ':callbacks', '*', 'task', task) end
end
return out
