"""Sum over the heads of o that share a head of a tensor: the last step of its gradient where heads are shared.

Computes   out[t, h, x] = partial[t, h G, x] + partial[t, h G + 1, x] + ... + partial[t, h G + G - 1, x].
Launched   by ``sum_heads`` in launch.py, after the kernels that store ``partial`` in float32: ``gradients_kernel`` of the
           portable backward pass (backward.py; q, k and g), and the kernels of ``hopper`` (launch_hopper.py; also v and initial
           states). In the portable pass chunk_output.py and chunk.py add up shared heads of v and of states in the CTA that
           owns them.
Grid       one CTA per token and block of BLOCK elements of its row of ``out``.
Order      a thread adds the G terms of its elements from the first to the last head, in float32, and rounds once: results do not
           depend on the device or its load.
Memory     reads ``partial`` once and writes ``out`` once.
"""

import triton
import triton.language as tl


@triton.jit
def sum_heads_kernel(partial, out, heads, channels, out_stride_t, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``out`` [tokens, heads, channels], tokens ``out_stride_t`` apart; ``partial`` is [tokens, heads GROUP, channels]."""
    width = heads * channels
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = partial + token * width * GROUP + (element // channels) * GROUP * channels + element % channels
    total = tl.load(first, mask=element < width, other=0.0)
    for each in tl.static_range(1, GROUP):
        total += tl.load(first + each * channels, mask=element < width, other=0.0)
    tl.store(out + token * out_stride_t + element, total.to(out.dtype.element_ty), mask=element < width)
