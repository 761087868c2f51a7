-- KEYS stream   ARGV group consumer entry_id…   A living consumer keeps what it works on: its idle time starts again,
-- unless somebody else has taken the entry over. Returns 1 or 0 per entry.
local out = {}
for i = 3, #ARGV do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if p[1] and p[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    table.insert(out, 1)
  else
    table.insert(out, 0)
  end
end
return out
