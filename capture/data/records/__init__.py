"""Input records: their sources and files, their fields, the samples and rejects they become."""
