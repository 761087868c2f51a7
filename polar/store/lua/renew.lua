-- include lib
-- ARGV lease_seconds (session_id fence)…   Returns per session: 1 renewed, 2 renewed and its cancel is wanted, 0 lost.
local out = {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  if get(id, 'fence') == ARGV[i + 1] and redis.call('ZSCORE', ns .. ':leases', id) then
    redis.call('ZADD', ns .. ':leases', now + tonumber(ARGV[1]), id)
    table.insert(out, get(id, 'cancel') == '1' and 2 or 1)
  else
    table.insert(out, 0)
  end
end
return out
