"""Decoding a small language model at batch 1: model import, the operation ``decode_step``, sampling and text."""
