-- include lib
-- ARGV session_id
return cancel(ARGV[1])
