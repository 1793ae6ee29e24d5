"""The five steps of a study: plan, verify, time, count, decide; and the report."""
