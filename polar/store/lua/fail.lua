-- include lib
-- ARGV session_id fence mode ledger_line error_json retry(0/1) delay_seconds
-- An attempt failed in the machinery. mode 'worker': its worker says so. 'expired': the reaper, lease run out.
-- 'waiting': the reaper, the node is gone while the session waited there. Returns 'retry', 'postrun' or 'stale'.
local LONGEST_REST = 300 -- seconds
-- Codes of INIT that say more of the task, of an upgrade, or of what all nodes share, than of the node.
local NOT_THE_NODE = {
  prepare_failed = true, image_missing = true, unreadable = true, worker_shutdown = true, store_unavailable = true,
  internal = true,
}
-- A node whose INIT fails is kept back (see admit), for twice as long after each failure in a row. What fails while it
-- rests was admitted before, and tells nothing new.
local function rest(node)
  local key = ns .. ':node:' .. node
  if tonumber(redis.call('HGET', key, 'rests_until') or '0') > now then return end
  local failures = redis.call('HINCRBY', key, 'init_failures', 1)
  local seconds = math.min(LONGEST_REST, 5 * 2 ^ (failures - 1))
  redis.call('HSET', key, 'rests_until', string.format('%.6f', now + seconds))
end
local id, mode = ARGV[1], ARGV[3]
local state, lease = get(id, 'state'), redis.call('ZSCORE', ns .. ':leases', id)
if get(id, 'fence') ~= ARGV[2] then return 'stale' end
if mode == 'waiting' then
  if state ~= 'ADMITTED' and state ~= 'READY' then return 'stale' end
else
  if state ~= 'INITIALIZING' and state ~= 'RUNNING' then return 'stale' end
  if not lease then return 'stale' end
  if mode == 'expired' and tonumber(lease) > now then return 'stale' end
end
-- Whoever still believes to hold the session is fenced off from here on.
next_fence(id)
redis.call('ZREM', ns .. ':leases', id)
want_cleanup(id)
redis.call('HSET', skey(id), 'error', ARGV[5], 'failed_on', get(id, 'node'))
if state == 'INITIALIZING' and get(id, 'cancel') ~= '1' and not NOT_THE_NODE[cjson.decode(ARGV[5]).code] then
  rest(get(id, 'node'))
end
if ARGV[6] == '1' and get(id, 'cancel') ~= '1' then
  redis.call('RPUSH', skey(id) .. ':ledger', ARGV[4])
  free_places(id)
  event(id, 'RETRY', ARGV[5])
  enqueue(id, now + tonumber(ARGV[7]))
  ring()
  return 'retry'
end
redis.call('HSET', skey(id), 'termination', get(id, 'cancel') == '1' and 'cancelled' or 'infra_error')
to_postrun(id)
return 'postrun'
