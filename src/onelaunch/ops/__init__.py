"""The operations: each a public function with a contract, an oracle, a cost and variants."""

from onelaunch.ops.gated_scan import gated_scan
from onelaunch.ops.gla import chunk_gla, chunk_simple_gla, fused_recurrent_gla, gla
from onelaunch.ops.linear_rnn import linear_rnn

__all__ = ["chunk_gla", "chunk_simple_gla", "fused_recurrent_gla", "gated_scan", "gla", "linear_rnn"]
