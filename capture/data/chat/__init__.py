"""Conversations, and their rendering by a chat template."""
