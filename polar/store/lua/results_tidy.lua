-- include results_lib
-- KEYS stream   ARGV group min_idle_ms except   Removes consumers that hold nothing and have been silent for long. Only
-- inside a script is that safe: removing one that holds entries would lose them. Returns how many went.
local gone = 0
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local name = field(c, 'name')
  if name ~= ARGV[3] and field(c, 'pending') == 0 and field(c, 'idle') >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], name)
    gone = gone + 1
  end
end
return gone
