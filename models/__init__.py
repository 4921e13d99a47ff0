"""Models: decoder structure, layer-id conventions, pipeline group, loading."""
