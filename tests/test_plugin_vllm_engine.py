"""The vllm engine with vllm, on a GPU: held to the hf engine and to fresh forward passes of transformers.

One engine for all tests, since a process can start one. It stands in a process group as a run's does (gloo, no port).
"""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import tiny_models
import torch

from quickstart.plugin.engine import Generator, Sampling
from quickstart.trainers import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm"),
]

# Heads of 64, the smallest that every attention kernel of vllm takes. Weights are made smaller than in other tests: the
# log-probs of two bfloat16 passes of the others are 0.3 apart (transformers on a CPU), of these less than 0.05.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
STOP = [1, *range(100, 112)]  # answers end now and then
PROMPTS = [[5, 6, 7], [40, 41], list(range(10, 60)), [200] * 17, [5, 6, 7]]
NEAR = 0.05  # in bfloat16, of a logit or a log-prob
ROWS, POSITIONS = 16, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_policy(tmp_path_factory.mktemp("vllm"), "qwen2_tied", **SHAPE)


def policy(folder, seed):
    """A float32 model on the GPU, as the actor is, of weights that bfloat16 holds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    tiny_models.fill_weights(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.4 if "layers" in name else 0.3)
            parameter.copy_(parameter.bfloat16())
    return model.cuda().eval()


@pytest.fixture(scope="module")
def models(folder):
    return {seed: policy(folder, seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def started(folder):
    from transformers import AutoConfig

    from quickstart.plugin.vllm_engine import VllmGenerator, cache_bytes

    environment.set_variables("cuda")
    cache = cache_bytes(AutoConfig.from_pretrained(folder), ROWS, POSITIONS, 2)
    with environment.process_group():
        yield VllmGenerator(
            str(folder),
            dtype="bfloat16",
            positions=POSITIONS,
            stop_token_ids=STOP,
            seed=0,
            max_rows=ROWS,
            cache=max(cache, 1 << 30),  # so that what sleep gives back is seen
            share=0.01,
        )


def send(engine, model):
    """All names of the state dict, as verl sends them: the tied head too."""
    engine.load_weights(iter(model.state_dict().items()))


@pytest.fixture
def engine(started, models):
    send(started, models[1])
    started.begin(1, 0)
    return started


def greedy(engine, new=24):
    return engine.generate(PROMPTS, [Sampling(temperature=0.0, max_new_tokens=new)] * len(PROMPTS))


@torch.no_grad()
def logits_of(model, prompt, answer):
    """Of the places that the answer's tokens were drawn at, (tokens, vocabulary) in float32."""
    ids = torch.tensor([[*prompt, *answer]], device="cuda")
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def assert_same_up_to_near_ties(ours, theirs, model):
    """Where two greedy answers part, the two tokens are as likely as bfloat16 can tell."""
    for prompt, a, b in zip(PROMPTS, ours, theirs, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        parted = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if parted is None:
            assert len(a.token_ids) == len(b.token_ids)
            continue
        logits = logits_of(model, prompt, a.token_ids[: parted + 1])[-1]
        x, y = pairs[parted]
        assert abs(logits[x] - logits[y]) < 2 * NEAR, (prompt, parted)


def in_half(model):
    """As the hf engine holds it: parameters in bfloat16, the rotary frequencies in float32."""
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    return half


def by_hf(model):
    return greedy(Generator(in_half(model), stop_token_ids=STOP, pad_token_id=1, seed=0))


def test_greedy_answers_are_those_of_the_hf_engine(engine, models):
    ours = greedy(engine)
    assert_same_up_to_near_ties(ours, by_hf(models[1]), models[1])
    assert {answer.finish_reason for answer in ours} <= {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_a_fresh_forward_pass(engine, models, temperature):
    sampling = Sampling(temperature=temperature, max_new_tokens=24)
    for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, [sampling] * len(PROMPTS)), strict=True):
        logits = logits_of(models[1], prompt, answer.token_ids) / (temperature or 1.0)
        tokens = torch.tensor(answer.token_ids, device="cuda")[:, None]
        fresh = logits.log_softmax(-1).gather(-1, tokens)[:, 0].cpu()
        off = (torch.tensor(answer.log_probs) - fresh).abs()
        assert off.max() < NEAR / (temperature or 1.0), off


def test_log_probs_are_those_of_the_filtered_distribution(engine):
    """With one token left it is certain; where two of bfloat16 are equal, vllm leaves both."""
    sampling = Sampling(top_k=1, max_new_tokens=8)
    found = [p for answer in engine.generate(PROMPTS, [sampling] * len(PROMPTS)) for p in answer.log_probs]
    certain = [p for p in found if abs(p) < 1e-6]
    assert all(p == pytest.approx(-math.log(2), abs=1e-6) for p in found if p not in certain)
    assert len(certain) > 0.8 * len(found)


def test_an_answer_ends_with_its_stop_token(engine):
    answers = engine.generate([[5, 6, 7]] * 64, [Sampling(max_new_tokens=40)] * 64)
    for answer in answers:
        assert not set(answer.token_ids[:-1]) & set(STOP)
        assert (answer.token_ids[-1] in STOP) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 40
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_draws_follow_from_the_step(engine):
    def drawn(*numbers):
        engine.begin(*numbers)
        return [answer.token_ids for answer in engine.generate([[5, 6, 7]] * 8, [Sampling(max_new_tokens=8)] * 8)]

    first, other, again = drawn(1, 0), drawn(2, 0), drawn(1, 0)
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) > 1


def test_answers_follow_an_update(engine, models):
    before = greedy(engine)
    send(engine, models[2])
    after = greedy(engine)
    assert [a.token_ids for a in after] != [a.token_ids for a in before]
    assert_same_up_to_near_ties(after, by_hf(models[2]), models[2])


def test_sleep_gives_memory_back_and_waking_needs_new_weights_only(engine, models):
    before = greedy(engine)
    awake = torch.cuda.mem_get_info()[0]
    engine.release()
    assert torch.cuda.mem_get_info()[0] - awake > 0.9 * (1 << 30)
    engine.resume("weights")
    send(engine, models[2])
    engine.resume("kv_cache")
    assert_same_up_to_near_ties(greedy(engine), by_hf(models[2]), models[2])
    send(engine, models[1])
    assert [a.token_ids for a in greedy(engine)] == [a.token_ids for a in before]


def test_weights_are_checked_by_name(engine, models):
    weights = models[1].state_dict()
    short = {name: value for name, value in weights.items() if name != "model.layers.2.self_attn.k_proj.weight"}
    with pytest.raises(AssertionError, match=r"missing .*k_proj"):
        engine.load_weights(iter(short.items()))
    more = weights | {"model.layers.0.lora_A.weight": weights["model.norm.weight"]}
    with pytest.raises(AssertionError, match=r"unknown .*lora_A"):
        engine.load_weights(iter(more.items()))
