"""How values leave a model: taps on its layers, the residual stream read from a layer, early stop."""
