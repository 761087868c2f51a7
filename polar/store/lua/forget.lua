-- include lib
-- ARGV task_id before   Removes a task that was finished before then, with its sessions. Returns its results queue, or ''.
local tkey = ns .. ':task:' .. ARGV[1]
local finished = tonumber(redis.call('HGET', tkey, 'finished') or '')
if not finished or finished >= tonumber(ARGV[2]) then return '' end
local queue = redis.call('HGET', tkey, 'queue')
for _, id in ipairs(redis.call('LRANGE', tkey .. ':sessions', 0, -1)) do
  redis.call('DEL', skey(id), skey(id) .. ':ledger')
end
redis.call('DEL', tkey, tkey .. ':sessions')
redis.call('ZREM', ns .. ':tasks', ARGV[1])
return queue
