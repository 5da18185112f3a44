"""Absolute tolerances of the model tests, by dtype. Widths and layers are small, log-probs are a few nats."""

# two ways of computing the same log-probability, gradient entry or hidden state
SAME = {"float64": 1e-10, "float32": 1e-5}
# bfloat16 compute against float32 compute of the same masters, nats a token
HALF = 0.1
# logits against transformers, in float32
HUGGING_FACE = 1e-4
# golden numbers are printed with six decimals
GOLDEN = 1e-6
