"""Lean layers give what transformers' give, values and gradients, and keep less."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quickstart.plugin.lean_layers import SiluTimes, make_lean, store_products

IDS = torch.arange(5, 29).view(2, 12)


@pytest.fixture
def models(tiny_tied):
    plain = AutoModelForCausalLM.from_pretrained(tiny_tied, dtype=torch.float32).eval()
    lean = copy.deepcopy(plain)
    layers = plain.config.num_hidden_layers
    assert make_lean(lean) == 3 * layers + 1, "two norms and one MLP a layer, and the last norm"
    return plain, lean


def test_values_and_gradients_in_float32(models):
    plain, lean = models
    outs = [model(IDS).logits for model in models]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    for out in outs:
        out.square().mean().backward()
    for (name, a), (_, b) in zip(lean.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_under_autocast_the_products_are_the_same(models):
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (model(IDS).logits.float() for model in models)
    assert (a - b).abs().max() < 0.02 * b.abs().max()


def kept_bytes(model):
    """Bytes that autograd keeps for the backward pass, shared ones once."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        out = model.model(IDS.repeat(8, 4)).last_hidden_state
    assert out.requires_grad
    return sum(size for address, size in seen.items() if address not in weights)


def test_less_is_kept(models):
    """A token keeps, in every layer, at least SwiGLU's product less."""
    plain, lean = models
    layers, tokens = plain.config.num_hidden_layers, IDS.repeat(8, 4).numel()
    product = 2 * plain.config.intermediate_size  # in bf16: silu(gate) and silu(gate) * up are made again
    assert kept_bytes(plain) - kept_bytes(lean) > layers * tokens * product


def test_silu_times_against_finite_differences():
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(SiluTimes.apply, (gate, up))


def test_a_layer_that_computes_something_else_stays(tiny_tied):
    model = AutoModelForCausalLM.from_pretrained(tiny_tied, dtype=torch.float32)
    norm = model.model.norm
    norm.variance_epsilon, norm.forward = 0.5, lambda x: 2 * x
    make_lean(model)
    torch.testing.assert_close(norm(torch.ones(1, norm.weight.shape[0])), 2 * torch.ones(1, norm.weight.shape[0]))


def test_other_families_are_left_alone():
    assert make_lean(nn.Linear(2, 2)) == 0


def test_a_frozen_model_in_the_type_of_its_products_gives_the_same(models):
    plain, stored = models[0], copy.deepcopy(models[0])
    store_products(stored, torch.bfloat16)
    assert stored.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert stored.lm_head.weight.dtype == stored.model.norm.weight.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(stored(IDS).logits, plain(IDS).logits, rtol=0, atol=0)
