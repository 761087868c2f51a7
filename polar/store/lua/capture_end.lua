-- KEYS attempt, inflight, capture, stored   ARGV completion_id blob prompt_tokens sampled_tokens cached_tokens retention
-- Stores one completion exactly once, also if its registration was lost; an empty blob abandons a generation that
-- sampled nothing (no turn is charged). A closed attempt still records: what was sampled is never lost.
-- Returns the attempt's state, or 'duplicate'.
local registered = redis.call('HDEL', KEYS[2], ARGV[1]) == 1
if ARGV[2] == '' then
  if not registered then return 'duplicate' end
  redis.call('HINCRBY', KEYS[1], 'turns', -1)
else
  if redis.call('SADD', KEYS[4], ARGV[1]) == 0 then return 'duplicate' end
  redis.call('XADD', KEYS[3], '*', 'c', ARGV[2])
  redis.call('EXPIRE', KEYS[3], ARGV[6])
  redis.call('EXPIRE', KEYS[4], ARGV[6])
  redis.call('HINCRBY', KEYS[1], 'prompt_tokens', ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'sampled_tokens', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'cached_tokens', ARGV[5])
end
return redis.call('HGET', KEYS[1], 'state') or 'unknown'
