"""Decisions: which measurements a criterion compares, how it is judged, what to do next, and what changed between results."""
