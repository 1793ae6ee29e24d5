"""Variants of ``decode_step``: PyTorch and the megakernel."""
