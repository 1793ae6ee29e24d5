"""Variants of ``decode_step``: those in PyTorch, and those of the megakernel."""
