"""Whether what the pool has is worth loading."""
