"""Short causal convolution over time, with SiLU or without, and its gradients."""
