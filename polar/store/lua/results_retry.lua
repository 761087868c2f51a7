-- KEYS stream, dead   ARGV max   Puts up to `max` dead references back, oldest first. Returns how many it took.
local items = redis.call('LRANGE', KEYS[2], 0, ARGV[1] - 1)
for _, item in ipairs(items) do
  local flat = {}
  for name, value in pairs(cjson.decode(item).fields) do
    table.insert(flat, name)
    table.insert(flat, value)
  end
  if #flat > 0 then redis.call('XADD', KEYS[1], '*', unpack(flat)) end -- else its entry was gone already
  redis.call('LPOP', KEYS[2])
end
return #items
