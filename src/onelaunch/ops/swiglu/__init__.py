"""Operation ``swiglu``: silu(x w_gate^T) * (x w_up^T) for plain, float8 and NVFP4 operands."""

from onelaunch.ops.swiglu.contract import swiglu

from onelaunch.ops.swiglu import cost, probes, reference, typical, variants  # isort: skip  (register into swiglu)
from onelaunch.ops.swiglu.functions import dual_gemm_nvfp4, swiglu_fp8, swiglu_nvfp4

__all__ = ["cost", "dual_gemm_nvfp4", "probes", "reference", "swiglu", "swiglu_fp8", "swiglu_nvfp4", "typical", "variants"]
