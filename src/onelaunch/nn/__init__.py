"""PyTorch modules built on the operations: layers that train, load checkpoints of other libraries, and decode with a cache."""

from onelaunch.nn.cache import Cache, LayerState
from onelaunch.nn.convolution import ShortConvolution
from onelaunch.nn.gla import GatedLinearAttention
from onelaunch.nn.hgrn import HGRN2Attention, HGRNAttention
from onelaunch.nn.linear_rnn import LinearRNN
from onelaunch.nn.norm import RMSNorm
from onelaunch.nn.simple_gla import SimpleGatedLinearAttention
from onelaunch.nn.swiglu import SwiGLU

__all__ = [
    "Cache",
    "GatedLinearAttention",
    "HGRN2Attention",
    "HGRNAttention",
    "LayerState",
    "LinearRNN",
    "RMSNorm",
    "ShortConvolution",
    "SimpleGatedLinearAttention",
    "SwiGLU",
]
