-- KEYS attempt, inflight, capture, stored   ARGV completion_id blob prompt_tokens sampled_tokens cached_tokens retention
--   whole ('1': its client is yet to get it; see AsyncCapture.delivered)
-- Stores one completion exactly once, also if its registration was lost; an empty blob abandons a generation that
-- sampled nothing (no turn is charged). A closed attempt still records: what was sampled is never lost.
-- Returns {the attempt's state or 'duplicate'}, and for a stored one the stream's length and the entry's id.
local owner = redis.call('HGET', KEYS[2], ARGV[1])
local registered = redis.call('HDEL', KEYS[2], ARGV[1]) == 1
if ARGV[2] == '' then
  if not registered then return {'duplicate'} end
  redis.call('HINCRBY', KEYS[1], 'turns', -1)
  return {redis.call('HGET', KEYS[1], 'state') or 'unknown'}
end
if redis.call('SADD', KEYS[4], ARGV[1]) == 0 then return {'duplicate'} end
local entry = redis.call('XADD', KEYS[3], '*', 'c', ARGV[2])
if ARGV[7] == '1' then
  redis.call('HSET', KEYS[1], 'undelivered:' .. ARGV[1], 1)
  -- A call that failed before this one began was got over: it is no reason for how the agent ends.
  local index = owner and tonumber(string.match(owner, '|(%d+)$'))
  for i, at in ipairs(redis.call('HMGET', KEYS[1], 'infra_at', 'context_overflow_at')) do
    if at and index and index >= tonumber(at) then
      local note = i == 1 and 'infra' or 'context_overflow'
      redis.call('HDEL', KEYS[1], note, note .. '_at')
    end
  end
end
redis.call('EXPIRE', KEYS[3], ARGV[6])
redis.call('EXPIRE', KEYS[4], ARGV[6])
redis.call('HINCRBY', KEYS[1], 'prompt_tokens', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'sampled_tokens', ARGV[4])
redis.call('HINCRBY', KEYS[1], 'cached_tokens', ARGV[5])
return {redis.call('HGET', KEYS[1], 'state') or 'unknown', redis.call('XLEN', KEYS[3]), entry}
