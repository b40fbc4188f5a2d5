"""Decoding with joined projections: transformers' own numbers, in fewer operations, with the weights of the model."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from quickstart.plugin.engine import Sampling
from quickstart.plugin.graph_engine import ATTENTION, GraphGenerator
from quickstart.plugin.lean_decode import join_projections, turned

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 6, 7], [40], list(range(60, 90)), [200, 3, 3, 3, 9, 100, 101]]
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@pytest.fixture(params=["tiny_tied", "tiny_llama", "qwen3"])
def model(request):
    """As it is, in float32: Qwen2 with biases, Llama without, Qwen3 with norms of queries and keys."""
    if request.param != "qwen3":
        folder = request.getfixturevalue(request.param)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION).eval()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 264}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(**shape, **heads, max_position_embeddings=512, attn_implementation=ATTENTION)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.3, 0.3)
    return model


def generate(model, lean):
    generator = GraphGenerator(model, lean=lean, stop_token_ids=[10_000], pad_token_id=1, seed=0)
    return generator.generate(PROMPTS, [GREEDY] * len(PROMPTS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(model, device, kind):
    """In bf16 rounding differs, and with it the choice between near ties: so the log-probs up to there."""
    model = model.to(device, kind)
    lean = copy.deepcopy(model)
    assert join_projections(lean)
    for mine, theirs in zip(generate(lean, True), generate(model, False), strict=True):
        same = [a == b for a, b in zip(mine.token_ids, theirs.token_ids, strict=True)]
        until = same.index(False) if False in same else len(same)
        assert until == len(same) or kind == torch.bfloat16
        tolerance = 1e-4 if kind == torch.float32 else 0.1
        assert mine.log_probs[:until] == pytest.approx(theirs.log_probs[:until], abs=tolerance)
        assert until > 0


def test_parameters_keep_names_and_values_and_take_new_ones(model):
    lean = copy.deepcopy(model)
    join_projections(lean)
    assert lean.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(lean.state_dict()[name], value), name
    with torch.no_grad():
        for mine, theirs in zip(lean.parameters(), model.parameters(), strict=True):
            theirs.mul_(0.9)
            mine.copy_(theirs)  # as the rollout takes the actor's weights after each update
    answers, expected = generate(lean, True), generate(model, False)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_twelve_operations_less_in_each_layer_and_step(model):
    def kernels(model, lean):
        with Counter() as counter:
            generate(model, lean)
        return counter.count

    lean = copy.deepcopy(model)
    join_projections(lean)
    steps = GREEDY.max_new_tokens - 1  # the first token comes with the prompt
    assert kernels(model, False) - kernels(lean, True) >= 12 * steps * model.config.num_hidden_layers


def test_a_prompt_goes_transformers_way(model):
    lean = copy.deepcopy(model)
    join_projections(lean)
    ids = torch.tensor([PROMPTS[2]])
    torch.testing.assert_close(lean(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_other_families_are_left_alone(tiny_tied):
    model = AutoModelForCausalLM.from_pretrained(tiny_tied)
    model.config.model_type = "other"
    assert not join_projections(model)
    assert not hasattr(model.model.layers[0].self_attn, "_whole")


def test_turned_by_hand():
    """(1, 2, 3, 4) with halves paired: (1, 3) and (2, 4), each turned by 90 degrees."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    assert turned(x, cos, sin).flatten().tolist() == [-3, -4, 1, 2]
