"""Operations: public functions, each with a contract, an oracle, a cost and variants."""

from onelaunch.formats import Fp8Tensor, NVFP4Tensor, dequantize_nvfp4, load_nvfp4, quantize_fp8, quantize_nvfp4, save_nvfp4
from onelaunch.operation.registry import load_ablations
from onelaunch.ops.gated_scan import chunk_hgrn, fused_recurrent_hgrn, gated_scan
from onelaunch.ops.gla import chunk_gla, chunk_simple_gla, fused_recurrent_gla, fused_recurrent_simple_gla, gla
from onelaunch.ops.gla_layer import gla_layer
from onelaunch.ops.linear_rnn import linear_rnn
from onelaunch.ops.output_chain import output_chain
from onelaunch.ops.projections import Segment, projections
from onelaunch.ops.rms_norm import rms_norm
from onelaunch.ops.swiglu import dual_gemm_nvfp4, swiglu, swiglu_fp8, swiglu_nvfp4

__all__ = [
    "Fp8Tensor",
    "NVFP4Tensor",
    "Segment",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_simple_gla",
    "dequantize_nvfp4",
    "dual_gemm_nvfp4",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_simple_gla",
    "gated_scan",
    "gla",
    "gla_layer",
    "linear_rnn",
    "load_nvfp4",
    "output_chain",
    "projections",
    "quantize_fp8",
    "quantize_nvfp4",
    "rms_norm",
    "save_nvfp4",
    "swiglu",
    "swiglu_fp8",
    "swiglu_nvfp4",
]

load_ablations()
