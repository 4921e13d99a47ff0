"""Which module is which: decoder structure, layer-id conventions, pipeline group, loading."""
