-- KEYS attempt, inflight, capture
-- ARGV completion_id proxy_id max_turns max_total_tokens (0 = no limit) known last
-- Counts a turn and registers the generation. Returns {'ok', index, news} or {reason, -1, news}; repeated after a lost
-- answer, it says the same again. `news` are the entries of the capture stream behind `last`, if it has more than `known`.
local news = {}
if redis.call('XLEN', KEYS[3]) > tonumber(ARGV[5]) then
  news = redis.call('XRANGE', KEYS[3], ARGV[6] == '-' and '-' or '(' .. ARGV[6], '+')
end
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then return {'ok', tonumber(string.match(known, '|(%d+)$')), news} end
local a = redis.call('HMGET', KEYS[1], 'state', 'turns', 'prompt_tokens', 'sampled_tokens')
if not a[1] then return {'unknown', -1, news} end
if a[1] ~= 'open' then return {'closed', -1, news} end
local max_turns, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
local limit = nil
if max_turns > 0 and tonumber(a[2] or '0') >= max_turns then limit = 'turn_limit' end
if not limit and max_tokens > 0 and tonumber(a[3] or '0') + tonumber(a[4] or '0') >= max_tokens then
  limit = 'token_limit'
end
if limit then
  -- Who didn't know the latest answer may only want that once more: the session has run into its limit when they ask again.
  if #news == 0 then redis.call('HSETNX', KEYS[1], 'limit', limit) end
  return {limit, -1, news}
end
redis.call('HINCRBY', KEYS[1], 'turns', 1)
local index = redis.call('HINCRBY', KEYS[1], 'next_index', 1) - 1
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. '|' .. index)
return {'ok', index, news}
