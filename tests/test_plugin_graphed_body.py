"""Replayed passes against eager ones, and log-probs from hidden states against those from logits.

Without a GPU the captured pass is run instead of replayed: buffers, gradients, masks and padding are the same code.
"""

import copy
import os
import subprocess
import sys
import textwrap
import weakref

import local_runs
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from quickstart.plugin import fused_head, graphed_body, shims
from quickstart.plugin.fused_head import patch_one_model
from quickstart.plugin.graphed_body import Arena, GraphedBody, can_graph, graph_body

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(graphed_body, "CAPTURE_AFTER", 1)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def batch(lengths, device, vocabulary=100, seed=0):
    """Right-padded token ids with mask and positions."""
    dice = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    ids = torch.randint(5, vocabulary, (len(lengths), width), generator=dice) * mask
    positions = torch.arange(width).expand(len(lengths), width) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "position_ids": positions.to(device)}


def pair_of(kind, folder, device, arena):
    """The same model twice: as it is, and with a graphed body."""
    torch.manual_seed(0)
    plain = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device).eval()
    graphed = copy.deepcopy(plain)
    graph_body(graphed, arena)
    return plain, graphed


def test_a_plain_pass_keeps_no_casts_of_the_weights(tiny_tied, device):
    _, graphed = pair_of(AutoModelForCausalLM, tiny_tied, device, Arena())
    caches = []
    graphed.base_model.layers[0].register_forward_hook(lambda *_: caches.append(torch.is_autocast_cache_enabled()))
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        graphed.base_model(**batch([3], device))
        assert torch.is_autocast_cache_enabled()
    assert caches == [False]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def updates(models, mini_batches):
    """Gradients of each mini batch, micro batches added up, for each model."""
    found = [[] for _ in models]
    for micro_batches in mini_batches:
        for model, seen in zip(models, found, strict=True):
            model.zero_grad(set_to_none=True)
            for inputs in micro_batches:
                (
                    model(**inputs, use_cache=False).logits * inputs["attention_mask"][..., None]
                ).square().mean().backward()
            seen.append(gradients(model))
    return found


class TestGraphedBody:
    @pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForTokenClassification])
    def test_gradients_are_the_eager_ones_through_accumulation_and_padding(self, tiny_tied, device, kind):
        plain, graphed = pair_of(kind, tiny_tied, device, Arena())
        # eager first, then captured, then replayed; lengths that share a bucket and such that do not; an eager shape
        # and a captured one in one mini batch
        shapes = [[(5, 9), (7, 3)], [(9, 2), (8, 8)], [(40, 3), (6, 5)], [(4, 4), (33, 40)]]
        minis = [[batch(s, device, seed=i * 2 + j) for j, s in enumerate(m)] for i, m in enumerate(shapes)]
        ours, theirs = updates([graphed, plain], minis)
        assert graphed.base_model.forward._passes, "nothing was captured: the test shows nothing"
        for a, b in zip(ours, theirs, strict=True):
            assert set(a) == set(b)
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)

    def test_two_models_share_the_buffers(self, tiny_tied, device):
        arena = Arena()
        plain, first = pair_of(AutoModelForCausalLM, tiny_tied, device, arena)
        second = copy.deepcopy(plain)
        graph_body(second, arena)
        minis = [[batch((5, 9), device, seed=i)] for i in range(3)]
        expected = updates([plain], minis)[0]
        for _ in range(2):  # one model's mini batches, then the other's, as verl does it
            for model in (first, second):
                for a, b in zip(updates([model], minis)[0], expected, strict=True):
                    for name in a:
                        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
        buffers = [m.base_model.forward._buffers[0].data_ptr() for m in (first, second)]
        assert buffers[0] == buffers[1]

    def test_without_gradients(self, tiny_tied, device):
        plain, graphed = pair_of(AutoModelForCausalLM, tiny_tied, device, Arena())
        with torch.no_grad():
            for seed, lengths in enumerate([(5, 9), (9, 4), (3, 20), (30, 31)]):
                inputs = batch(lengths, device, seed=seed)
                real = inputs["attention_mask"].bool()
                a, b = graphed(**inputs).logits[real], plain(**inputs).logits[real]
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_moved_weights_are_seen(self, tiny_tied, device):
        plain, graphed = pair_of(AutoModelForCausalLM, tiny_tied, device, Arena())
        inputs = batch((5, 9), device)
        with torch.no_grad():
            for _ in range(3):
                graphed(**inputs)
            for model in (plain, graphed):
                for p in model.parameters():
                    p.data = p.data * 1.5  # another address
            torch.testing.assert_close(graphed(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-5)

    def test_what_it_does_not_know_goes_the_old_way(self, tiny_tied):
        plain, graphed = pair_of(AutoModelForCausalLM, tiny_tied, "cpu", Arena())
        ids = batch((6, 6), "cpu")["input_ids"]
        for _ in range(3):
            cached = graphed(ids, use_cache=True)
            assert cached.past_key_values.get_seq_length() == 6
            torch.testing.assert_close(cached.logits, plain(ids).logits)
        assert not graphed.base_model.forward._passes

    def test_a_capture_that_fails_is_told_and_the_run_goes_on(self, tiny_tied, monkeypatch):
        told = []
        plain, graphed = pair_of(AutoModelForCausalLM, tiny_tied, "cpu", Arena())
        graphed.base_model.forward._tell = told.append

        def fail(*_):
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(GraphedBody, "_capture", fail)
        inputs = batch((5, 9), "cpu")
        for _ in range(3):
            torch.testing.assert_close(graphed(**inputs).logits, plain(**inputs).logits)
        assert len(told) == 1
        assert "no room" in told[0]

    def test_what_a_failed_capture_held_is_free_before_the_pass_is_done_the_old_way(self, tiny_tied, monkeypatch):
        _, graphed = pair_of(AutoModelForCausalLM, tiny_tied, "cpu", Arena())
        body = graphed.base_model
        held, alive = [], []

        def fail(*_):
            kept = torch.zeros(3)
            held.append(weakref.ref(kept))
            raise RuntimeError("not permitted when the stream is capturing")

        monkeypatch.setattr(GraphedBody, "_capture", fail)
        body.layers[0].register_forward_hook(lambda *_: alive.extend(ref() for ref in held))
        inputs = batch((5, 9), "cpu")
        for _ in range(2):
            graphed(**inputs)
        assert alive == [None]
        assert body.forward._arena.pool is None

    def test_a_micro_batch_is_captured_while_the_loss_of_the_one_before_lives(self, tiny_tied, device):
        """verl's loop holds it until the next one is there (transformer_impl.py:751)."""
        plain, graphed = pair_of(AutoModelForCausalLM, tiny_tied, device, Arena())
        told = []
        graphed.base_model.forward._tell = told.append
        found = []
        for model in (plain, graphed):
            loss = None
            for seed in range(4):
                with torch.autocast(device, torch.bfloat16):
                    loss = model(**batch((5, 9), device, seed=seed), use_cache=False).logits.float().square().mean()
                loss.backward()
            assert loss is not None
            found.append(gradients(model))
        assert not told
        assert graphed.base_model.forward._passes
        for name in found[0]:
            torch.testing.assert_close(found[1][name], found[0][name], rtol=0.05, atol=1e-2)

    def test_a_capture_has_leaves_of_its_own(self, tiny_tied, monkeypatch):
        """On a GPU those of the model may belong to the stream of an eager pass, which cannot wait for a capture."""
        _, graphed = pair_of(AutoModelForCausalLM, tiny_tied, "cpu", Arena())
        asked = []
        real = torch.autograd.grad
        monkeypatch.setattr(
            torch.autograd, "grad", lambda out, leaves, *more: asked.extend(leaves) or real(out, leaves, *more)
        )
        for _ in range(3):
            graphed(**batch((5, 9), "cpu"), use_cache=False).logits.square().mean().backward()
        mine = {id(p) for p in graphed.parameters()}
        assert asked
        assert not mine & {id(leaf) for leaf in asked}
        assert {p.data_ptr() for p in graphed.base_model.layers.parameters()} <= {leaf.data_ptr() for leaf in asked}

    def test_only_models_that_it_is_right_for(self, tiny_tied):
        model = AutoModelForCausalLM.from_pretrained(tiny_tied, attn_implementation="sdpa")
        assert can_graph(model)
        model.gradient_checkpointing_enable()
        assert not can_graph(model)
        model.gradient_checkpointing_disable()
        model.lm_head.weight.requires_grad_(False)
        assert not can_graph(model)


@pytest.fixture
def fused(tiny_tied, device):
    """(plain, with the fused head) in the type asked for by autocast."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_tied, dtype=torch.float32).to(device).eval()
    other = copy.deepcopy(plain)
    called = []
    patch_one_model(lambda **more: called.append(more))(
        model=other, use_fused_kernels=True, fused_kernels_backend="torch"
    )
    assert called[0]["use_fused_kernels"] is False, "verl's own patch would change the class"
    return plain, other


class TestFusedHead:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("chunk", [4, 1024])
    def test_log_probs_entropy_and_gradients_are_those_of_the_logits(
        self, fused, device, temperature, chunk, monkeypatch
    ):
        monkeypatch.setattr(fused_head, "CHUNK", chunk)
        plain, other = fused
        inputs = batch((5, 9, 7), device)
        scores = (plain(**inputs).logits / temperature).log_softmax(-1)
        labels = inputs["input_ids"].roll(-1, -1)
        log_probs, entropy = scores.gather(-1, labels[..., None])[..., 0], -(scores.exp() * scores).sum(-1)
        out = other(**inputs, temperature=temperature, return_dict=True)
        torch.testing.assert_close(out.log_probs, log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.entropy, entropy, rtol=1e-5, atol=1e-5)
        (log_probs.mean() + 0.1 * entropy.mean()).backward()
        (out.log_probs.mean() + 0.1 * out.entropy.mean()).backward()
        ours, theirs = gradients(other), gradients(plain)
        assert set(ours) == set(theirs)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)

    def test_tokens_without_a_gradient_change_nothing(self, fused, device, monkeypatch):
        """The prompt's tokens: the loss does not read them, the backward pass leaves them out."""
        monkeypatch.setattr(fused_head, "CHUNK", 4)
        plain, other = fused
        inputs = batch((5, 9, 7), device)
        answer = torch.arange(9, device=device) > 3
        labels = inputs["input_ids"].roll(-1, -1)
        scores = plain(**inputs).logits.log_softmax(-1)
        (scores.gather(-1, labels[..., None])[..., 0] * answer).sum().backward()
        (other(**inputs, temperature=1.0).log_probs * answer).sum().backward()
        for name, gradient in gradients(other).items():
            torch.testing.assert_close(gradient, gradients(plain)[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("chunk", [4, 1024])
    def test_entropy_of_a_pass_without_gradients(self, fused, device, chunk, monkeypatch):
        monkeypatch.setattr(fused_head, "CHUNK", chunk)
        plain, other = fused
        inputs = batch((5, 9, 7), device)
        with torch.no_grad():
            scores = (plain(**inputs).logits / 0.7).log_softmax(-1)
            entropy = other(**inputs, temperature=0.7, return_dict=True).entropy
        torch.testing.assert_close(entropy, -(scores.exp() * scores).sum(-1), rtol=1e-5, atol=1e-5)

    def test_half_precision_is_rounded_once(self, device):
        """Logits of bf16; all else in float32: verl's own function, and the exact value of the same logits."""
        from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

        dice = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, 16, generator=dice).to(device, torch.bfloat16) for n in (40, 300))
        labels = torch.arange(40, device=device)
        log_probs = fused_head.HeadLogProbs.apply(hidden, weight, labels, 1.0)
        logits = (hidden @ weight.t()).double()
        exact = logits.log_softmax(-1)[labels, labels]
        torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=1e-5)
        torch.testing.assert_close(log_probs, FusedLinearForPPOFunction.apply(hidden, weight, labels)[0])

    def test_products_are_taken_in_the_autocast_type(self, fused, device):
        plain, other = fused
        inputs = batch((5, 9, 7), device)
        with torch.autocast(device, torch.bfloat16):
            a = other(**inputs, temperature=1.0).log_probs
        b = plain(**inputs).logits.log_softmax(-1).gather(-1, inputs["input_ids"].roll(-1, -1)[..., None])[..., 0]
        assert a.dtype == torch.float32
        assert (a - b).abs().max() < 0.05

    def test_answers_can_be_generated_with_it(self, fused, device):
        """As the samples of DPO and KTO are: a cache, the logits of the last place."""
        plain, other = fused
        ids = batch((5, 5), device)["input_ids"]
        expected = plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(other.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)

    def test_the_class_stays_what_it_was(self, fused, device):
        plain, other = fused
        assert type(other).forward is type(plain).forward
        assert "forward" not in vars(plain)
        assert plain(**batch((5, 4), device)).logits is not None


def test_a_body_captures_at_once_where_another_has(tiny_tied, device, monkeypatch):
    """Eager passes beside the memory of graphs would take as much again."""
    monkeypatch.setattr(graphed_body, "CAPTURE_AFTER", 3)
    arena = Arena()
    first, second = (pair_of(AutoModelForCausalLM, tiny_tied, device, arena)[1] for _ in range(2))
    inputs = batch((5, 4), device)
    for _ in range(4):
        first(**inputs)
    if device == "cpu":
        assert arena.pool is None
        arena.pool = object()  # as a capture on a GPU leaves it
    assert arena.pool is not None
    for _ in range(2):
        second(**inputs)
    assert len(second.base_model.forward._passes) == 1


def test_a_run_with_both_gives_the_numbers_of_a_run_without(tiny_tied, sums, tmp_path, monkeypatch, process_variables):
    """PPO with critic and reference, two updates a step, four steps: every metric."""

    def run(name, **sections):
        rl = {"rl_type": "ppo", "per_device_train_batch_size": 4, "recompute_old_log_probs": True}
        cfg = local_runs.settings(tiny_tied, rl=rl, **sections)
        return local_runs.run(local_runs.verl_config_of(cfg, sums, tmp_path / name, steps=4, evaluation=sums))

    without = run("without")
    arenas = []
    real = shims.leave_whole
    monkeypatch.setattr(shims, "leave_whole", lambda arena, tell: real(arenas.append(Arena()) or arenas[-1], tell))
    with_both = run("with", verl={"actor_rollout_ref.model.use_fused_kernels": True})
    assert arenas[0]._flat, "no pass was captured: the test shows nothing"
    for step, metrics in without.updates.items():
        for metric, value in metrics.items():
            if "timing" not in metric and "perf/" not in metric:
                assert with_both.updates[step][metric] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, metric)


@pytest.mark.gpu
def test_growing_lengths_reserve_little_more_than_the_longest():
    """In a process of its own, with the allocator as a run sets it."""
    script = """
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from quickstart.plugin import graphed_body, shims
        undo = shims.install("cuda")
        config = Qwen2Config(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
                             num_key_value_heads=2, vocab_size=1000, attn_implementation="sdpa")
        model = Qwen2ForCausalLM(config).cuda()
        graphed_body.graph_body(model, graphed_body.Arena())
        graphed_body.CAPTURE_AFTER = 1

        def reserved(lengths):
            for length in lengths:
                ids = torch.zeros(32, length, dtype=torch.int64, device="cuda")
                for _ in range(3):
                    with torch.autocast("cuda", torch.bfloat16):
                        out = model.base_model(input_ids=ids, attention_mask=ids + 1, position_ids=ids)[0]
                    out.float().sum().backward()
                    model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            return torch.cuda.memory_reserved()

        longest = reserved([512])
        graphed_body.release_graphs(model)
        torch.cuda.empty_cache()
        growing = reserved([256, 320, 384, 448, 512])
        assert growing < 1.4 * longest, (growing / 2**30, longest / 2**30)
    """
    # conftest's platform for the tests on a CPU: with it verl leaves the allocator as it is
    variables = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
