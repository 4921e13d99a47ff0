"""Conversations become token ids and loss masks; what cannot is rejected with a reason."""
