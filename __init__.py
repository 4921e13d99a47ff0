"""hiddentap: hidden states of causal language models, at explicit layers, exactly and once."""
