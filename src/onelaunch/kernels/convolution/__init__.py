"""Short causal convolution over time with SiLU, and its gradients."""
