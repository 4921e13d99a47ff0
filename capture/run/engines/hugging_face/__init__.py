"""A Hugging Face model in this process, in memory or read layer by layer."""
