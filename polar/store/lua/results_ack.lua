-- include results_lib
-- KEYS stream, failures   ARGV group entry_id   Returns 1, or 0 if the entry wasn't pending any more.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return ack(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
