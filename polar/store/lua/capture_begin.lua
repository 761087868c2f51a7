-- KEYS attempt, inflight   ARGV completion_id proxy_id max_turns max_total_tokens (0 = no limit)
-- Counts a turn and registers the generation. Returns {'ok', index} or {reason}. Repeated after a lost answer, it says
-- the same again.
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then return {'ok', tonumber(string.match(known, '|(%d+)$'))} end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown'} end
if state ~= 'open' then return {'closed'} end
local turns = tonumber(redis.call('HGET', KEYS[1], 'turns') or '0')
local used = tonumber(redis.call('HGET', KEYS[1], 'prompt_tokens') or '0')
           + tonumber(redis.call('HGET', KEYS[1], 'sampled_tokens') or '0')
local limit = nil
if tonumber(ARGV[3]) > 0 and turns >= tonumber(ARGV[3]) then limit = 'turn_limit' end
if not limit and tonumber(ARGV[4]) > 0 and used >= tonumber(ARGV[4]) then limit = 'token_limit' end
if limit then
  redis.call('HSETNX', KEYS[1], 'limit', limit)
  return {limit}
end
redis.call('HINCRBY', KEYS[1], 'turns', 1)
local index = redis.call('HINCRBY', KEYS[1], 'next_index', 1) - 1
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. '|' .. index)
return {'ok', index}
