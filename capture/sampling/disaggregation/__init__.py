"""Prefill and decode in separate processes: the first token and the cache in between."""
