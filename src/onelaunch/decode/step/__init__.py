"""The operation ``decode_step``: contract, oracle, cost and variants."""
