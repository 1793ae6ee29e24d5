"""Decisions: select the measurements of a criterion, judge it, decide what to do next, and compare results."""
