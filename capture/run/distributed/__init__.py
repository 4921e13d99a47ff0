"""One run on several processes: ranks that share shards, tensor groups that share a model."""
