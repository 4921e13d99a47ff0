"""The generation loop: prompts in, requests with their rows out."""
