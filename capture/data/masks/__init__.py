"""Loss masks: which tokens of a rendered conversation are supervised."""
