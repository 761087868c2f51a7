-- include lib
-- ARGV session_id   Asks for the end of a session. Returns its state before, or ''. A waiting session goes to POSTRUN at
-- once; a worked-on one is told by its lease renewal. Every cancelled session still gets its result.
local id = ARGV[1]
local state = get(id, 'state')
if state == '' or state == 'DONE' then return state end
redis.call('HSET', skey(id), 'cancel', '1')
if state == 'PENDING' or state == 'ADMITTED' or state == 'READY' then
  redis.call('ZREM', ns .. ':pending', id)
  redis.call('ZREM', ns .. ':delayed', id)
  redis.call('HINCRBY', skey(id), 'fence', 1)
  redis.call('HSET', skey(id), 'termination', 'cancelled')
  if state ~= 'PENDING' then want_cleanup(id) end
  to_postrun(id, 'cancelled')
elseif state == 'RUNNING' and get(id, 'mode') == 'capture' then
  redis.call('HSET', skey(id), 'termination', 'cancelled', 'run_ended', stamp())
  to_postrun(id, 'cancelled')
end
return state
