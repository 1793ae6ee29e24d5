"""The gated scan over time: kernels, their launches, and the decoupled look-back."""
