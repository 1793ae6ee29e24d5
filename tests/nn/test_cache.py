"""Tests of decoding with a cache: a prompt and single steps equal one call; what a cache stores, counts and refuses.

``make(name)`` returns a small layer and its definition in plain PyTorch. ``D`` is the number of columns of x. ``error`` is the
norm of a difference, relative to that of the true values.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``each_sequence`` applies a definition to each batch entry. ``weights_of`` returns a module's state dict in float64. ``NAMES`` are
the names of all small layers of the tests. ``ROUNDING`` is the tolerance between float32 calls that split time differently. A
test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch import checks, dispatch
from onelaunch.errors import ArgumentError
from onelaunch.nn import Cache
from tests.nn.definitions import each_sequence, error, weights_of
from tests.nn.layers import NAMES, ROUNDING, D, make

each_layer = pytest.mark.parametrize("name", NAMES)


@each_layer
@pytest.mark.parametrize("prompt", [1, 2, 17])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_prompt_and_single_steps_equal_one_call(name, prompt, in_place):
    layer, definition = make(name)
    x, cache = torch.randn(2, 24, D), Cache(in_place=in_place)
    with torch.no_grad():
        parts = [layer(x[:, :prompt], past_key_values=cache, use_cache=True)[0]]
        for t in range(prompt, 24):
            o, _, returned = layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)
            assert returned is cache
            assert cache.get_seq_length(0) == t + 1
            parts.append(o)
        assert error(torch.cat(parts, 1), each_sequence(definition, layer, weights_of(layer), x.double())) < 3e-6
        torch.testing.assert_close(torch.cat(parts, 1), layer(x)[0], **ROUNDING)


@each_layer
def test_padded_prompts_continue_with_the_mask_of_all_steps(name):
    """Generation extends the mask with the sequence, and padding is on the left."""
    layer, definition = make(name)
    lengths, prompt, length = (4, 9), 9, 14
    x = torch.randn(2, length, D)
    mask = torch.ones(2, length, dtype=torch.int64)
    for row, count in enumerate(lengths):
        mask[row, : prompt - count] = 0
    o, _, cache = layer(x[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True)

    def step(t):
        return layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)[0]

    found = torch.cat([o, *(step(t) for t in range(prompt, length))], 1)
    for row in range(2):
        tokens = mask[row] == 1
        assert error(found[row, tokens], definition(layer, weights_of(layer), x[row, tokens].double())) < 5e-6


@each_layer
def test_packed_sequences_can_be_continued(name):
    layer, definition = make(name)
    first, rest = (7, 1, 0), (2, 3, 4)
    sequences = [torch.randn(a + b, D) for a, b in zip(first, rest, strict=True)]
    cache = Cache()
    for lengths, part in (
        (first, [sequence[:count] for sequence, count in zip(sequences, first, strict=True)]),
        (rest, [sequence[count:] for sequence, count in zip(sequences, first, strict=True)]),
    ):
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        o = layer(torch.cat(part)[None], cu_seqlens=cu_seqlens, past_key_values=cache, use_cache=True)[0][0]
    for found, sequence, count in zip(o.split(list(rest)), sequences, first, strict=True):
        assert error(found, definition(layer, weights_of(layer), sequence.double())[count:]) < 5e-6


@each_layer
def test_gradients_flow_through_the_states(name):
    layer, _ = make(name)
    x = torch.randn(1, 20, D, requires_grad=True)
    layer(x)[0].square().sum().backward()
    true, x.grad = x.grad.double(), None
    first, _, cache = layer(x[:, :11], use_cache=True)
    rest = layer(x[:, 11:], past_key_values=cache)[0]
    (first.square().sum() + rest.square().sum()).backward()
    assert error(x.grad, true) < 1e-5
    x.grad = None
    cache.detach_()
    layer(x[:, 11:], past_key_values=cache)[0].square().sum().backward()
    assert bool((x.grad[:, :11] == 0).all())


@pytest.mark.parametrize("name", ["gla", "gla-conv", "linear_rnn"])
def test_without_use_cache_nothing_is_stored(name):
    layer, _ = make(name)
    cache = layer(torch.randn(1, 5, D), use_cache=True)[2]
    before, steps = [tensor.clone() for tensor in cache[0].tensors()], cache.get_seq_length()
    layer(torch.randn(1, 5, D), past_key_values=cache)
    assert cache.get_seq_length() == steps
    for kept, value in zip(cache[0].tensors(), before, strict=True):
        assert torch.equal(kept, value)


def test_states_have_the_documented_shapes():
    layer, _ = make("gla-conv-bias")
    cache = layer(torch.randn(3, 5, D), use_cache=True)[2]
    state = cache[0]
    assert state.recurrent_state.shape == (3, layer.num_heads, layer.head_k_dim, layer.head_v_dim)
    assert state.recurrent_state.dtype is torch.float32
    # for q, k and v: B, channels, and the conv_size - 1 inputs before the next step
    assert [tuple(each.shape) for each in state.conv_state] == [(3, 32, 2), (3, 16, 2), (3, 32, 2)]
    assert (len(cache), 0 in cache, 1 in cache, cache.get(1), cache.get_seq_length(1)) == (1, True, False, None, 0)


@pytest.mark.parametrize("in_place", [False, True])
@each_layer
@torch.no_grad()
def test_sequences_of_a_cache_can_be_reordered(name, in_place):
    layer, _ = make(name)
    x, step, order = torch.randn(2, 6, D), torch.randn(2, 1, D), torch.tensor([1, 1])
    cache = layer(x, past_key_values=Cache(in_place=in_place), use_cache=True)[2]
    cache.reorder_cache(order)
    expected = layer(torch.cat([x[order], step], 1))[0][:, -1:]
    torch.testing.assert_close(layer(step, past_key_values=cache)[0], expected, **ROUNDING)
    cache.reset()
    assert len(cache) == 0


@pytest.mark.parametrize("name", ["simple-conv", "linear_rnn"])
def test_in_place_states_keep_their_memory(name, prose):
    """A captured CUDA graph holds their addresses."""
    layer, _ = make(name)
    cache = Cache(in_place=True)
    with torch.no_grad():
        layer(torch.randn(1, 4, D), past_key_values=cache, use_cache=True)
        places = [tensor.data_ptr() for tensor in cache[0].tensors()]
        values = [tensor.clone() for tensor in cache[0].tensors()]
        layer(torch.randn(1, 1, D), past_key_values=cache, use_cache=True)
    assert places == [tensor.data_ptr() for tensor in cache[0].tensors()]
    assert not any(torch.equal(tensor, value) for tensor, value in zip(cache[0].tensors(), values, strict=True))
    values = [tensor.clone() for tensor in cache[0].tensors()]
    cache.reorder_cache(torch.zeros(1, dtype=torch.int64))
    cache.detach_()
    assert places == [tensor.data_ptr() for tensor in cache[0].tensors()]
    assert all(torch.equal(tensor, value) for tensor, value in zip(cache[0].tensors(), values, strict=True))
    with prose.raises(ArgumentError, match="in_place"):
        cache.reorder_cache(torch.zeros(2, dtype=torch.int64))
    with prose.raises(ArgumentError, match="in_place"):
        layer(torch.randn(1, 1, D), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("name", "operations", "in_place"),
    [
        ("gla", ["projections", "projections", "gla", "output_chain"], False),
        ("gla", ["projections", "projections", "gla", "output_chain"], True),
        ("simple", ["projections", "gla", "output_chain"], False),
    ],
)
def test_a_step_is_a_few_operations_and_no_other_function(name, operations, in_place, monkeypatch):
    """Every other function that creates or writes a tensor would be a separate launch on a GPU.

    ``operations`` are those that a step calls. With ``in_place`` it also copies the new state over the cached one.
    """
    called, beside, run = [], [], dispatch.run

    class Beside(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            returned = function._schema.returns  # functions that only return views launch nothing
            if not inside and not all(each.alias_info is not None and not each.alias_info.is_write for each in returned):
                beside.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    inside = []

    def watched(operation, call, variant):
        called.append(operation.name)
        inside.append(operation)
        try:
            return run(operation, call, variant)
        finally:
            inside.pop()

    layer, _ = make(name)
    cache = Cache(in_place=in_place)
    with torch.no_grad():
        layer(torch.randn(2, 5, D), past_key_values=cache, use_cache=True)
        step = torch.randn(2, 1, D)
        monkeypatch.setattr(dispatch, "run", watched)
        # On a CPU checks read values, unlike on a GPU, with operators that would count as called beside the operations.
        monkeypatch.setattr(checks, "values_are_checked", lambda value: False)
        with Beside():
            layer(step, past_key_values=cache, use_cache=True)
    assert called == operations
    assert beside == ["copy_"] * in_place


def test_layers_of_a_model_share_a_cache():
    first, _ = make("gla")
    second = copy.deepcopy(first)
    second.layer_idx = 1
    x, cache = torch.randn(1, 8, D), Cache()
    for part in x.split([5, 1, 2], 1):
        part = first(part, past_key_values=cache, use_cache=True)[0]
        last = second(part, past_key_values=cache, use_cache=True)[0]
    assert len(cache) == 2
    torch.testing.assert_close(last, second(first(x)[0])[0][:, -2:], **ROUNDING)


def test_a_call_with_other_sequences_than_the_cached_ones_is_refused(prose):
    layer, _ = make("gla")
    cache = layer(torch.randn(2, 5, D), use_cache=True)[2]
    with prose.raises(ArgumentError, match="past_key_values"):
        layer(torch.randn(3, 1, D), past_key_values=cache)
    with prose.raises(ArgumentError, match="past_key_values"):
        layer(torch.randn(1, 5, D), past_key_values=cache, cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gla", "simple-conv", "linear_rnn", "hgrn-conv", "hgrn2"])
def test_a_step_compiles(name):
    layer, _ = make(name)
    cache, x = Cache(), torch.randn(2, 7, D)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        parts = [compiled(part, past_key_values=cache, use_cache=True)[0] for part in x.split([5, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x)[0], **ROUNDING)
