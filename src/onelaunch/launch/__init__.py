"""The launch of a kernel, and how PyTorch and the inspector see it."""
