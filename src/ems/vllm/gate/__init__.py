"""Whether the pool is used: is it well, and is what it found worth loading."""
