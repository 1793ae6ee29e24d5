"""Products with matrices of a kernel's stream in PyTorch, for tests on a CPU and on a GPU.

``by_matrix`` multiplies by a plain matrix, and ``from_tables`` by the addresses that the kernel reads.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.decode.plan.packing import as_operands, matrix


def by_matrix(weights, op, layer, x, bias=None):
    """Return a product with a plain matrix in float32, its operand and its result in the order in which the kernel has them."""
    rows = weights.lm_head if op == "lm_head" else matrix(weights.layers[layer], op)
    found = F.linear(as_operands(x).float(), rows.float())
    if op == "qkv":
        natural = weights.config.query_size + weights.config.key_value_size
        found = torch.cat([found[:, :natural], as_operands(found[:, natural:])], 1)
    elif op == "gate_up":
        gate, up = found.chunk(2, -1)
        found = as_operands(F.silu(gate) * up)
    elif op != "lm_head":
        found = as_operands(found)
    return found if bias is None else found + bias.float()


def from_tables(products, op, layer, x, bias=None, tiles=None):
    """Return what ``StreamProducts.multiply`` does, by PyTorch: every element is read from where the kernel reads it."""
    table = products.tables[op]
    k = torch.arange(table.columns, device=x.device)
    part = k % table.run // 32
    if table.steps:
        part = part // table.steps + part % table.steps * 8
    tile, row = table.sources.long() // 8, table.sources.long() % 8
    places = table.starts[layer].long()[tile][:, k // table.run] + part
    found = F.linear(x.float(), products._stream.data.view(-1, 8, 32)[places, row[:, None], k % 32].float())
    if op == "gate_up":
        gate, up = found.view(len(x), -1, 2, 8).unbind(2)
        found = (F.silu(gate) * up).flatten(1)
    return (found if bias is None else found + bias.float()).to(x.dtype)


def operands(products, op, tokens, dtype, *, biased):
    """Return random tokens and biases of a product."""
    table = products.tables[op]
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, table.columns, generator=generator).to(table.sources.device, dtype)
    return x, torch.randn(len(table.sources), generator=generator).to(x) if biased else None
