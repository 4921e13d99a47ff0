"""Random models, run in random ways, beside plain forwards that share no code with hiddentap."""
