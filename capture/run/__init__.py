"""The offline run: plan, batches, forward, rows on disk."""
