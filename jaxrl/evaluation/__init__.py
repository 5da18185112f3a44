"""What a model can do: exact probabilities on enumerable tasks, pass@k, coverage, modes, perplexity."""
