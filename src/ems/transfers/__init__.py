"""Copies between an engine's KV cache and the pool's pages: what is copied (plans), by what (devices, lanes)."""
