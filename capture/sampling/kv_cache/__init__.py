"""Key-value caches whose rows are selected, joined and cut."""
