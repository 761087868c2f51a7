"""The session store: Redis is the truth, every transition is one Lua script."""
