"""Gluon as this package uses it."""
