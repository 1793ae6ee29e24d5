"""The operations: each a public function with a contract, an oracle, a cost and variants."""

from onelaunch.ops.gated_scan import gated_scan
from onelaunch.ops.linear_rnn import linear_rnn

__all__ = ["gated_scan", "linear_rnn"]
