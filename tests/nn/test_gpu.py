"""Test on a GPU that a decoding step of ``GatedLinearAttention`` takes few launches and can be captured in a CUDA graph.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.dispatch import choice
from onelaunch.nn import Cache, GatedLinearAttention
from onelaunch.operation import Query, Variant, find_operation
from onelaunch.workbench.measure.launches import launches_in

pytestmark = [pytest.mark.gpu]

PORTABLE = {"projections": "epilogue", "gla": "stepwise", "output_chain": "prologue"}
KERNELS = {
    "portable": PORTABLE,
    "epilogue_persistent": {**PORTABLE, "projections": "epilogue_persistent"},
    "cluster": {**PORTABLE, "projections": "cluster"},
    "norm_gate": {**PORTABLE, "output_chain": "norm_gate"},
}
"""Variants that a decoding step uses: for each parameter of the test, the variant of each operation."""

MOST_LAUNCHES = {**dict.fromkeys(KERNELS, 6), "norm_gate": 7}
"""Largest number of launches of a step, including the copy of its new state over the cached one.

``norm_gate`` multiplies by PyTorch, whose product may take two launches.
"""

PROMPT, STEPS = 70, 5
"""Number of tokens of the prompt, and of single steps after it."""


def choose_for_steps(monkeypatch: pytest.MonkeyPatch, kernels: Mapping[str, str]) -> None:
    """Make the dispatcher choose these variants for calls of one step, whatever was measured.

    It asks ``choose`` in its own module, under ``no_grad`` first of all for ``gla_layer``, whose choice stays.
    """
    choose = choice.choose

    def chosen(query: Query) -> Variant:
        if query.sizes[1] != 1 or query.operation not in kernels:
            return choose(query)
        variant = find_operation(query.operation).get(kernels[query.operation])
        reason = variant.why_not(query)
        if reason and not is_hopper(torch.device(query.device)):
            pytest.skip(f"{query.operation}.{variant.name} {reason}")
        assert reason is None, f"{query.operation}.{variant.name} {reason}"  # on Hopper, all of these variants run
        return variant

    monkeypatch.setattr(choice, "choose", chosen)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("expand_k", [0.5, 1.0])
@pytest.mark.parametrize("name", KERNELS)
def test_a_captured_step_of_decoding(name, expand_k, batch, device, monkeypatch):
    """Replayed steps equal the eager calls bitwise, and take at most six launches if all kernels are our own."""
    choose_for_steps(monkeypatch, KERNELS[name])
    with torch.device(device):
        layer = GatedLinearAttention(hidden_size=2048, expand_k=expand_k, num_heads=16, layer_idx=0).bfloat16()
        x = torch.randn(batch, PROMPT + STEPS, 2048, dtype=torch.bfloat16)
    prompt, steps = x[:, :PROMPT], [x[:, t : t + 1].contiguous() for t in range(PROMPT, PROMPT + STEPS)]
    cache = Cache(in_place=True)
    layer(prompt, past_key_values=cache, use_cache=True)
    state = cache[0].recurrent_state
    begun = state.clone()
    expected = [(layer(step, past_key_values=cache, use_cache=True)[0], state.clone()) for step in steps]

    given, graph = steps[0].clone(), torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        out = layer(given, past_key_values=cache, use_cache=True)[0]
    assert launches_in(graph) <= MOST_LAUNCHES[name]
    state.copy_(begun)
    for step, (true, final) in zip(steps, expected, strict=True):
        given.copy_(step)
        graph.replay()
        assert torch.equal(out, true)
        assert torch.equal(state, final)
    assert cache[0].recurrent_state is state
