"""Read a weight once and do nothing else: the least time of a launch for few rows, whose bytes are those of the weight.

Computes   out[i, j] = sum of the tile (i, j) of W, [ROWS, COLUMNS] elements; the sums keep the compiler from dropping the loads
Grid       one CTA per tile, of 64 KB with 16-bit elements: at D = V = 2048 there are 128, one for each SM of a Hopper GPU
Memory     each thread asks for all of its elements at once, 16 bytes a load; one number per tile is written
Caller     ``weight_alone`` in launch_few_rows.py, for the control of that name
"""

import triton
import triton.language as tl


@triton.jit
def read_weight_kernel(weight, out, width, channels, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the sum of one tile of ``weight [width, channels]``, whose rows are ``stride`` elements apart, summed in float32."""
    i, j = tl.program_id(0), tl.program_id(1)
    rows = i * ROWS + tl.arange(0, ROWS)
    columns = j * COLUMNS + tl.arange(0, COLUMNS)
    at = weight + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tile = tl.load(at, mask=(rows < width)[:, None] & (columns < channels)[None, :], other=0.0)
    total = tl.sum(tl.sum(tile.to(tl.float32), 1), 0)
    tl.store(out + i * tl.num_programs(1) + j, total.to(out.dtype.element_ty))
