"""Images of a conversation, from local files to the inputs of a forward."""
