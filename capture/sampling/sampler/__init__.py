"""One sampling call: logits in, tokens out, and what observers record beside them."""
