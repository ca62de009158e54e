"""One model over several processes or machines, cut by layers."""
