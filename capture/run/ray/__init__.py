"""One run on the workers of a Ray cluster (extra `ray`)."""
