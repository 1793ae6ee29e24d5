"""Gluon under names that are the same for every supported Triton release."""
