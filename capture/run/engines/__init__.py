"""The inference backends of a run, each a package with a `KIND`."""
