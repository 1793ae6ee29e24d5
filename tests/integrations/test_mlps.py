"""Tests of the MLPs of transformers that ``accelerate`` replaces: results, gradients, hooks, compilation, refusals.

``LlamaMLP`` and the others are the real classes, so the tests need transformers. ``test_storage.py`` has the tests of where the
parameters lie, and ``test_mlp_calls.py`` those of calls that follow one like them and of steps of decoding.
"""

from __future__ import annotations

import copy
import importlib
import io
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch import accelerate
from onelaunch.errors import ArgumentError
from tests.integrations.standins import GatedMLP, RWKV6Attention

pytest.importorskip("transformers", reason="the MLPs are those of transformers, which the extra decode installs")
MODELS = ("llama", "mistral", "qwen2", "qwen3")


def config(**options):
    """Return what the constructors of the MLPs read of a configuration."""
    given = {"hidden_size": 32, "intermediate_size": 48, "hidden_act": "silu", "mlp_bias": False}
    return types.SimpleNamespace(**{**given, **options})


def mlp_of(model, **options):
    """Return a new MLP of a model of transformers."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    names = {"gemma": "GemmaMLP", "llama": "LlamaMLP", "mistral": "MistralMLP", "qwen2": "Qwen2MLP", "qwen3": "Qwen3MLP"}
    return getattr(module, names[model])(config(**options))


def run(module, x):
    """Return the result of a module, and the gradients of its input and of each parameter by name."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return y.detach(), {"x": x.grad, **{name: each.grad for name, each in module.named_parameters()}}


def assert_same(found, wanted, tolerance=1e-5):
    """Compare two results of :func:`run`: outputs by element, gradients by the norm of the difference.

    Both are float32, and differ by the order of sums alone: joined projections are one product instead of two.
    """
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("model", MODELS)
def test_results_gradients_and_parameters_stay(model):
    mlp, x = mlp_of(model), torch.randn(2, 5, 32)
    before, names = run(mlp, x), [*dict(mlp.named_parameters())]
    parameters, state = list(mlp.parameters()), copy.deepcopy(mlp.state_dict())
    report = accelerate(mlp)
    assert [each.operation for each in report.replaced] == ["swiglu"]
    assert_same(run(mlp, x), before)
    assert [*dict(mlp.named_parameters())] == names
    assert all(new is old for new, old in zip(mlp.parameters(), parameters, strict=True))
    assert len({each.grad.data_ptr() for each in parameters}) == 3
    assert all(torch.equal(state[name], value) for name, value in mlp.state_dict().items())
    assert not report.fallbacks


def test_undo_restores_the_bits_and_the_forward():
    mlp, x = mlp_of("llama"), torch.randn(7, 32)
    before = mlp(x)
    report = accelerate(mlp)
    assert "forward" in vars(mlp)
    report.undo()
    report.undo()
    assert mlp.forward.__func__ is type(mlp).forward
    assert "forward" not in vars(mlp)
    assert torch.equal(mlp(x), before)
    assert all(each.untyped_storage().nbytes() == each.numel() * 4 for each in mlp.parameters())
    with accelerate(mlp) as report:
        assert mlp.forward.__self__ is report.replaced[0].by
    assert "forward" not in vars(mlp)


def test_twice_is_once(prose):
    model = nn.Sequential(mlp_of("llama"), mlp_of("qwen3"))
    first = accelerate(model)
    forwards = [each.forward for each in model]
    second = accelerate(model)
    assert second.replaced == ()
    assert [each.name for each in second.already] == ["0", "1"]
    assert [each.forward for each in model] == forwards
    second.undo()
    assert all("forward" in vars(each) for each in model)
    prose(str(second))
    first.undo()
    assert not any("forward" in vars(each) for each in model)
    prose(str(first))


def test_state_dicts_load_both_ways():
    fast, plain, x = mlp_of("llama"), mlp_of("llama"), torch.randn(3, 32)
    accelerate(fast)
    plain.load_state_dict(fast.state_dict())
    torch.testing.assert_close(fast(x), plain(x))
    plain = mlp_of("llama")
    report = accelerate(fast)
    fast.load_state_dict(plain.state_dict())
    assert report.already[0].layout == "as one weight"
    torch.testing.assert_close(fast(x), plain(x))


def test_copies_and_pickles_compute_with_their_own_parameters():
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    accelerate(mlp)
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    for other in (copy.deepcopy(mlp), torch.load(file, weights_only=False)):
        assert other.forward.__self__.module is other
        with torch.no_grad():
            other.up_proj.weight.zero_()
        assert not other(x).any()
        assert [each.name for each in accelerate(other).already] == [""]
    assert mlp(x).any()


def test_files_hold_each_parameter_once(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="it checks the files that safetensors writes")
    mlp = mlp_of("llama")
    accelerate(mlp)
    safetensors.save_file(mlp.state_dict(), tmp_path / "model.safetensors")
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in mlp.state_dict().items())


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_a_frozen_weight_gets_no_gradient(frozen):
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    getattr(mlp, frozen).weight.requires_grad_(requires_grad=False)
    y, before = run(mlp, x)
    accelerate(mlp)
    found, after = run(mlp, x)
    torch.testing.assert_close(found, y)
    assert after.pop(f"{frozen}.weight") is before.pop(f"{frozen}.weight") is None
    assert_same((found, after), (y, before))


def test_hooks_on_the_module_and_its_parameters_run():
    mlp, seen = mlp_of("llama"), []
    mlp.register_forward_pre_hook(lambda *_: seen.append("before"))
    mlp.register_forward_hook(lambda *_: seen.append("after"))
    mlp.register_full_backward_hook(lambda *_: seen.append("backward"))
    accelerate(mlp)
    mlp.down_proj.register_forward_hook(lambda *_: seen.append("down_proj"))
    mlp.gate_proj.weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    mlp(torch.randn(3, 32, requires_grad=True)).sum().backward()
    assert seen == ["before", "down_proj", "after", (48, 32), "backward"]


def test_calls_whose_projections_have_hooks_run_the_original_forward(prose):
    mlp, seen = mlp_of("llama"), []
    report = accelerate(mlp)
    handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    mlp(torch.randn(3, 32))
    assert seen == [1]
    handle.remove()
    mlp(torch.randn(3, 32))
    mlp.gate_proj = nn.Sequential(mlp.gate_proj)  # as adapters do
    mlp(torch.randn(3, 32))
    assert report.fallbacks.total() == 2
    assert report.fallbacks["up_proj has hooks"] == 1
    mlp.gate_proj = mlp.gate_proj[0]
    mlp.double()(torch.randn(32, dtype=torch.float64))
    mlp.float()(torch.randn(32))
    prose(str(report))
    assert report.fallbacks.total() == 4


def test_autocast_and_checkpointing():
    mlp, x = mlp_of("llama"), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        before = run(mlp, x)
    plain = run(mlp, x)
    accelerate(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(mlp, x)
    assert found[0].dtype is torch.bfloat16
    assert_same(found, before, 1e-2)
    for reentrant in (False, True):
        mlp.zero_grad()
        given = x.detach().requires_grad_()
        y = checkpoint(mlp, given, use_reentrant=reentrant)
        y.square().sum().backward()
        gradients = {"x": given.grad, **{name: each.grad for name, each in mlp.named_parameters()}}
        assert_same((y.detach(), gradients), plain)


def test_a_whole_graph_is_compiled():
    mlp, x = mlp_of("llama"), torch.randn(4, 32)
    before = run(mlp, x)
    accelerate(mlp)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    assert_same(
        (lambda got: (got[0], {name.removeprefix("_orig_mod."): g for name, g in got[1].items()}))(run(compiled, x)), before
    )
    mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32))  # elsewhere in memory
    assert not compiled(x).any()


def test_a_second_gradient_is_that_of_the_original():
    mlp, x = mlp_of("llama"), torch.randn(4, 32, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(mlp(x).square().sum(), mlp.gate_proj.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, mlp.up_proj.weight])

    before = second()
    accelerate(mlp)
    for found, wanted in zip(second(), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # float32 sums in another order, through four products


class Own(nn.Module):
    """MLP of an unknown class."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def with_quantized_weight():
    mlp = mlp_of("llama")
    mlp.gate_proj = torch.ao.nn.quantized.dynamic.Linear(32, 48)
    return mlp


def with_adapter():
    mlp = mlp_of("llama")
    torch.nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity())
    return mlp


def with_hooked_projection():
    mlp = mlp_of("llama")
    mlp.gate_proj.register_forward_hook(lambda *_: None)
    return mlp


def with_forward_of_another_library():
    mlp = mlp_of("llama")
    mlp.forward = lambda x: x
    return mlp


def of_a_subclass():
    mlp = mlp_of("llama")
    mlp.__class__ = type("FasterMLP", (type(mlp),), {"forward": lambda self, x: x})
    return mlp


REFUSED = {
    "gemma": lambda: mlp_of("gemma", hidden_act="gelu_pytorch_tanh"),
    "gelu": lambda: mlp_of("qwen2", hidden_act="gelu"),
    "another activation": lambda: setattr(mlp := mlp_of("llama"), "act_fn", nn.GELU()) or mlp,
    "bias": lambda: mlp_of("llama", mlp_bias=True),
    "quantized": with_quantized_weight,
    "parametrized": with_adapter,
    "hooked projection": with_hooked_projection,
    "replaced forward": with_forward_of_another_library,
    "subclass": of_a_subclass,
    "float64": lambda: mlp_of("llama").double(),
    "meta": lambda: mlp_of("llama").to("meta"),
    "unknown class": Own,
    "powlu of fla": lambda: GatedMLP(hidden_act="powlu"),
    "layer of fla": RWKV6Attention,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("fla")
def test_what_is_refused_stays_and_has_a_reason(name, prose):
    module = REFUSED[name]()
    state, attributes = dict(module.named_parameters()), dict(vars(module))
    report = accelerate(nn.Sequential(module))
    assert report.replaced == ()
    (refused,) = report.refused
    assert (refused.name, refused.kind) == ("0", type(module).__qualname__)
    assert vars(module) == attributes
    assert all(state[key] is each for key, each in module.named_parameters())
    prose(refused.reason)


@pytest.mark.parametrize("version", ["4.50.3", "6.0.0.dev0", "unknown"])
def test_other_releases_are_refused(version, monkeypatch, prose):
    mlp = mlp_of("llama")
    monkeypatch.setattr("transformers.__version__", version)
    report = accelerate(mlp)
    assert [each.kind for each in report.refused] == ["LlamaMLP"]
    assert "forward" not in vars(mlp)
    prose(report.refused[0].reason)


def test_a_model_with_nothing_known_stays(prose):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    report = accelerate(model)
    assert report.replaced == report.refused == report.already == ()
    assert not any("forward" in vars(each) for each in model.modules())
    prose(str(report))


def test_bad_arguments(prose):
    with prose.raises(ArgumentError):
        accelerate("llama")
    mlp = mlp_of("llama")
    with torch.inference_mode(), prose.raises(ArgumentError):
        accelerate(mlp)
    assert "forward" not in vars(mlp)


def test_an_error_leaves_every_module_as_it_was(monkeypatch):
    model, x = nn.Sequential(mlp_of("llama"), mlp_of("qwen2")), torch.randn(3, 32)
    before, calls = model(x), []

    def fail(parameters):
        calls.append(parameters)
        if len(calls) == 2:
            raise MemoryError("no memory is left")

    monkeypatch.setattr("onelaunch.integrations.forward.lay", fail)
    with pytest.raises(MemoryError):
        accelerate(model)
    assert not any("forward" in vars(each) for each in model)
    assert torch.equal(model(x), before)


def test_a_model_of_transformers_generates_the_same_tokens():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **sizes)).eval()
    prompt = torch.randint(3, 64, (1, 5))
    before = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    report = accelerate(model)
    assert [each.name for each in report.replaced] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0), before)
