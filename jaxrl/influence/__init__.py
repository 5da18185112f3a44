"""How an update moves the log-probability of other solutions: the probe, exact gradients, and the kernel check."""
