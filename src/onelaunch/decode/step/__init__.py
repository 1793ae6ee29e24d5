"""Operation ``decode_step``: its contract, oracle, cost and variants."""
