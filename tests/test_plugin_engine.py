"""Token generation: log-probs, greedy decoding, sampling, stopping, batching. Three generators, three models."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstart.plugin import engine
from quickstart.plugin.engine import Generator, Sampling, _Settings, filter_logits, sample_tokens
from quickstart.plugin.graph_engine import ATTENTION, GraphGenerator
from quickstart.plugin.lean_decode import join_projections

STOP = 1  # <|im_end|>
PROMPTS = [[5, 6, 7], [40], list(range(60, 90)), [200, 3, 3, 3, 9, 100, 101]]
NEVER = 10_000  # beyond the vocabulary: no row ends by itself


def load(folder, attention="sdpa"):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()


@pytest.fixture(scope="module", params=["tiny_tied", "tiny_untied", "tiny_llama"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module", params=["dynamic", "fixed", "fixed and lean"])
def make(request, folder):
    """Makes a generator of each kind; keywords as of Generator."""
    fixed = request.param != "dynamic"
    model = load(folder, ATTENTION if fixed else "sdpa")
    lean = request.param == "fixed and lean" and join_projections(model)

    def make(**keywords):
        kind = partial(GraphGenerator, lean=lean) if fixed else Generator
        return kind(model, **({"stop_token_ids": [STOP], "pad_token_id": STOP, "seed": 0} | keywords))

    return make


@pytest.fixture(scope="module")
def tied_model(tiny_tied):
    return load(tiny_tied)


@pytest.fixture
def tied(tied_model):
    """Makes a plain Generator of the tied model."""

    def make(**keywords):
        return Generator(tied_model, **({"stop_token_ids": [STOP], "pad_token_id": STOP, "seed": 0} | keywords))

    return make


def kept(logits, top_k, top_p):
    """What may be drawn, by the definitions: the k likeliest, then of those the fewest that make up the mass p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    weights = torch.tensor([logits[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    before = itertools.accumulate(weights, initial=0.0)
    return {i for i, mass in zip(order, before, strict=False) if mass < top_p}


@torch.no_grad()
def fresh_log_probs(model, prompt, answer, sampling):
    """Log-prob of each answer token from one forward pass over the whole text, filters applied by `kept`."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    found = []
    for row, token in zip(logits / (sampling.temperature or 1.0), answer, strict=True):
        allowed = kept(row.tolist(), sampling.top_k, sampling.top_p) if sampling.temperature else range(len(row))
        mask = torch.full_like(row, float("-inf"))
        mask[list(allowed)] = 0.0
        found.append((row + mask).log_softmax(0)[token].item())
    return found


def assert_fresh(model, prompts, sampling, answers):
    for prompt, how, answer in zip(prompts, sampling, answers, strict=True):
        assert len(answer.log_probs) == len(answer.token_ids)
        wanted = fresh_log_probs(model, prompt, answer.token_ids, how)
        assert answer.log_probs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_trained_model_generates_under_autocast(folder, device):
    """float32 weights, products in bf16, a fixed cache: log-probs within bf16's error of a fresh pass. Twice, other
    weights the second time: before and after training."""
    model = load(folder).to(device)
    sampling = [Sampling(temperature=0, max_new_tokens=12)] * len(PROMPTS)
    seen = []
    for _ in range(2):
        generator = GraphGenerator(model, stop_token_ids=[NEVER], pad_token_id=STOP, seed=0)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            answers = generator.generate(PROMPTS, sampling)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                logits = model(torch.tensor([prompt + answer.token_ids], device=device)).logits[0, len(prompt) - 1 : -1]
            wanted = logits.float().log_softmax(-1).gather(-1, torch.tensor(answer.token_ids, device=device)[:, None])
            assert answer.log_probs == pytest.approx(wanted[:, 0].tolist(), abs=0.1)
        seen.append([answer.log_probs for answer in answers])
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    assert (torch.tensor(seen[0]) - torch.tensor(seen[1])).abs().max() > 0.3, "old weights would not show"


class TestLogProbs:
    @pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
    def test_equal_a_fresh_forward_pass(self, make, model, temperature):
        sampling = [Sampling(temperature=temperature, max_new_tokens=12)] * len(PROMPTS)
        assert_fresh(model, PROMPTS, sampling, make().generate(PROMPTS, sampling))

    @pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9}])
    def test_are_those_of_the_filtered_distribution(self, make, model, filters):
        sampling = [Sampling(temperature=1.3, max_new_tokens=12, **filters)] * len(PROMPTS)
        answers = make().generate(PROMPTS, sampling)
        assert_fresh(model, PROMPTS, sampling, answers)
        unfiltered = fresh_log_probs(
            model, PROMPTS[0], answers[0].token_ids, Sampling(temperature=1.3, max_new_tokens=12)
        )
        assert all(a > b + 0.01 for a, b in zip(answers[0].log_probs, unfiltered, strict=True))

    def test_each_request_has_its_own_settings(self, make, model):
        sampling = [
            Sampling(temperature=0.0, max_new_tokens=9),
            Sampling(temperature=1.5, max_new_tokens=4),
            Sampling(temperature=1.0, top_k=3, max_new_tokens=12),
            Sampling(temperature=0.8, top_p=0.5, max_new_tokens=1),
        ]
        answers = make(stop_token_ids=[NEVER]).generate(PROMPTS, sampling)
        assert [len(a.token_ids) for a in answers] == [9, 4, 12, 1]
        assert_fresh(model, PROMPTS, sampling, answers)

    def test_a_greedy_row_keeps_the_models_own_log_prob_beside_a_filtered_one(self, make, model):
        sampling = [Sampling(temperature=0.0, top_k=1, max_new_tokens=5), Sampling(top_k=2, max_new_tokens=5)]
        answers = make().generate(PROMPTS[:2], sampling)
        assert_fresh(model, PROMPTS[:2], sampling, answers)
        assert max(answers[0].log_probs) < -1e-3


def transformers_greedy(model, prompt, new, stop):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=stop,
        pad_token_id=STOP,
    )
    return out[0, len(prompt) :].tolist()


class TestGreedy:
    def test_equals_transformers_token_by_token(self, make, model):
        sampling = [Sampling(temperature=0.0, max_new_tokens=24)] * len(PROMPTS)
        answers = make(stop_token_ids=[NEVER]).generate(PROMPTS, sampling)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == transformers_greedy(model, prompt, 24, NEVER)
            assert answer.finish_reason == "length"

    def test_stops_where_transformers_does(self, make, model):
        """Stop tokens are taken from what the rows say anyway, so that rows end at different steps."""
        whole = [transformers_greedy(model, prompt, 24, NEVER) for prompt in PROMPTS]
        stops = [whole[0][3], whole[2][9]]
        sampling = [Sampling(temperature=0.0, max_new_tokens=24)] * len(PROMPTS)
        answers = make(stop_token_ids=stops).generate(PROMPTS, sampling)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            wanted = transformers_greedy(model, prompt, 24, stops)
            assert answer.token_ids == wanted
            assert answer.finish_reason == ("stop" if wanted[-1] in stops else "length")
        assert len({len(a.token_ids) for a in answers}) > 1

    @pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
    def test_rows_that_end_do_not_change_the_others(self, make, monkeypatch, share):
        monkeypatch.setattr(engine, "SHRINK_AT", share)
        limits = [3, 20, 7, 12]
        sampling = [Sampling(temperature=0.0, max_new_tokens=n) for n in limits]
        together = make(stop_token_ids=[NEVER]).generate(PROMPTS, sampling)
        for prompt, how, answer in zip(PROMPTS, sampling, together, strict=True):
            (alone,) = make(stop_token_ids=[NEVER]).generate([prompt], [how])
            assert answer.token_ids == alone.token_ids
            assert answer.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


class TestStopping:
    def test_the_stop_token_is_the_last_one(self, tied):
        sampling = [Sampling(temperature=3.0, max_new_tokens=400)] * 8
        stops = list(range(30))
        answers = tied(stop_token_ids=stops).generate([[5, 6]] * 8, sampling)
        for answer in answers:
            assert answer.finish_reason == "stop"
            assert answer.token_ids[-1] in stops
            assert not set(answer.token_ids[:-1]) & set(stops)

    def test_a_stop_token_at_the_limit_counts_as_stop(self, make, model):
        first = transformers_greedy(model, PROMPTS[0], 1, NEVER)
        how = Sampling(temperature=0.0, max_new_tokens=1)
        (answer,) = make(stop_token_ids=first).generate(PROMPTS[:1], [how])
        assert (answer.token_ids, answer.finish_reason) == (first, "stop")

    def test_a_row_stops_within_its_limit_or_not_at_all(self, make):
        """It may stay in the batch after its limit, and what is drawn there does not count."""
        limits, stops = [1 + i % 12 for i in range(36)], list(range(0, 264, 8))
        sampling = [Sampling(temperature=2.0, max_new_tokens=n) for n in limits]
        answers = make(stop_token_ids=stops).generate([[5, i] for i in range(36)], sampling)
        for limit, answer in zip(limits, answers, strict=True):
            ended = [token in stops for token in answer.token_ids]
            assert not any(ended[:-1])
            assert answer.finish_reason == ("stop" if ended[-1] else "length")
            assert len(ended) == limit or (ended[-1] and len(ended) < limit)
        assert {a.finish_reason for a in answers} == {"stop", "length"}

    def test_one_token(self, make):
        (answer,) = make(stop_token_ids=[NEVER]).generate([[7, 8]], [Sampling(max_new_tokens=1)])
        assert len(answer.token_ids) == len(answer.log_probs) == 1
        assert answer.finish_reason == "length"

    @pytest.mark.parametrize("prompts", [[[]], [[5, 6], []]])
    def test_an_empty_prompt_is_refused(self, make, prompts):
        with pytest.raises(AssertionError, match="empty prompt"):
            make().generate(prompts, [Sampling(max_new_tokens=2)] * len(prompts))

    def test_tokens_are_reported_as_they_come(self, tied):
        told = []
        sampling = [Sampling(temperature=0.0, max_new_tokens=n) for n in (3, 8, 5, 1)]
        answers = tied(stop_token_ids=[NEVER]).generate(PROMPTS, sampling, told.append)
        assert sum(told) == sum(len(a.token_ids) for a in answers) == 17
        assert told[0] == 4


class TestBatching:
    def forwards(self, generator, prompts, sampling):
        """(rows, width) of each forward pass."""
        shapes = []
        hook = generator.model.register_forward_pre_hook(
            lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        answers = generator.generate(prompts, sampling)
        hook.remove()
        return shapes, answers

    def test_a_group_shares_one_prefill(self, make, model):
        prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[0]]
        sampling = [Sampling(temperature=t, max_new_tokens=6) for t in (1.0, 1.0, 0.0, 1.0)]
        shapes, answers = self.forwards(make(stop_token_ids=[NEVER]), prompts, sampling)
        assert shapes[0] == (2, len(PROMPTS[2]))
        assert_fresh(model, prompts, sampling, answers)
        (alone,) = make(stop_token_ids=[NEVER]).generate([PROMPTS[0]], [sampling[2]])
        assert answers[2].token_ids == alone.token_ids

    def test_members_of_a_group_differ(self, tied):
        answers = tied().generate([PROMPTS[0]] * 6, [Sampling(max_new_tokens=8)] * 6)
        assert len({tuple(a.token_ids) for a in answers}) == 6

    def test_finished_rows_leave_the_batch(self, tied):
        sampling = [Sampling(temperature=0.0, max_new_tokens=n) for n in (2, 2, 9, 9)]
        shapes, _ = self.forwards(tied(stop_token_ids=[NEVER]), PROMPTS, sampling)
        assert [rows for rows, _ in shapes] == [4, 4, *[2] * 7]

    @pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (2, 2), (3, 2), (4, 4), (100, 4)])
    def test_max_rows_splits_evenly_and_keeps_the_order(self, make, rows, at_once):
        sampling = [Sampling(temperature=0.0, max_new_tokens=n) for n in (4, 6, 8, 10)]
        shapes, answers = self.forwards(make(stop_token_ids=[NEVER], max_rows=rows), PROMPTS, sampling)
        assert max(r for r, _ in shapes) == at_once
        whole = make(stop_token_ids=[NEVER]).generate(PROMPTS, sampling)
        assert [a.token_ids for a in answers] == [a.token_ids for a in whole]

    def test_a_fixed_cache_serves_all_batches_of_a_call(self, model, monkeypatch):
        """Five answers, two at a time: the third batch is filled up, and nothing of that is seen."""
        made = []
        real = GraphGenerator._new_step
        monkeypatch.setattr(GraphGenerator, "_new_step", lambda self, *a: made.append(a[0]) or real(self, *a))
        prompts = [*PROMPTS, [7, 7, 8]]
        sampling = [Sampling(temperature=0.0, max_new_tokens=8)] * 5
        options = {"stop_token_ids": [NEVER], "pad_token_id": STOP, "seed": 0}
        answers = GraphGenerator(model, max_rows=2, **options).generate(prompts, sampling)
        assert made == [2]
        expected = Generator(model, **options).generate(prompts, sampling)
        assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
        assert [a.finish_reason for a in answers] == ["length"] * 5
        assert GraphGenerator(model, max_rows=2, **options).generate([], []) == []

    def test_a_long_prompt_does_not_change_a_short_one(self, make):
        long, how = list(range(2, 202)), Sampling(temperature=0.0, max_new_tokens=10)
        beside = make(stop_token_ids=[NEVER]).generate([[9, 8], long], [how, how])[0]
        alone = make(stop_token_ids=[NEVER]).generate([[9, 8]], [how])[0]
        assert beside.token_ids == alone.token_ids
        assert beside.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


class TestDraws:
    def test_the_seed_decides(self, make):
        sampling = [Sampling(max_new_tokens=10)] * len(PROMPTS)

        def drawn(seed):
            return [a.token_ids for a in make(seed=seed).generate(PROMPTS, sampling)]

        assert drawn(3) == drawn(3)
        assert drawn(3) != drawn(4)

    def test_a_second_call_draws_anew(self, tied):
        generator, sampling = tied(), [Sampling(max_new_tokens=10)]
        first, second = (generator.generate([PROMPTS[0]], sampling)[0].token_ids for _ in range(2))
        assert first != second

    def test_after_begin_earlier_draws_do_not_matter(self, make):
        sampling = [Sampling(max_new_tokens=6)] * len(PROMPTS)

        def drawn(*numbers, before, seed=0):
            generator = make(seed=seed)
            for _ in range(before):
                generator.generate(PROMPTS, sampling)
            generator.begin(*numbers)
            return [a.token_ids for a in generator.generate(PROMPTS, sampling)]

        assert drawn(3, 0, before=0) == drawn(3, 0, before=2)
        different = [drawn(3, 0, before=0), drawn(3, 1, before=0), drawn(4, 0, before=0), drawn(3, 0, before=0, seed=1)]
        assert all(a != b for a, b in itertools.combinations(different, 2))

    def test_draws_leave_torchs_own_generator_alone(self, tied):
        before = torch.get_rng_state()
        tied().generate(PROMPTS, [Sampling(max_new_tokens=3)] * 4)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
    def test_frequencies_follow_the_distribution(self, temperature):
        """Chi-square over a vocabulary of 6: with 5 degrees of freedom 25.7 is passed once in 10,000 seeds."""
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
        rows = 40_000
        how = _Settings.of([Sampling(temperature=temperature, max_new_tokens=1)] * rows, 6, torch.device("cpu"))
        tokens, log_probs = sample_tokens(logits.expand(rows, -1), how, torch.Generator().manual_seed(0))
        expected = (logits / temperature).softmax(0)
        counts = torch.bincount(tokens, minlength=6)
        assert ((counts - rows * expected) ** 2 / (rows * expected)).sum() < 25.7
        torch.testing.assert_close(log_probs, expected.log()[tokens], rtol=0, atol=1e-5)

    def test_filtered_frequencies_are_renormalised(self):
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
        how = _Settings.of([Sampling(top_k=3, max_new_tokens=1)] * 40_000, 6, torch.device("cpu"))
        tokens, _ = sample_tokens(logits.expand(40_000, -1), how, torch.Generator().manual_seed(0))
        expected = torch.tensor([2.0, 1.0, 0.5]).softmax(0) * 40_000
        counts = torch.bincount(tokens, minlength=6)
        assert counts[[2, 3, 5]].tolist() == [0, 0, 0]
        assert ((counts[[0, 1, 4]] - expected) ** 2 / expected).sum() < 18.4  # 2 degrees of freedom, 1 in 10,000

    def test_a_tiny_top_p_is_greedy(self):
        random = torch.Generator().manual_seed(0)
        logits = torch.randn(200, 50, generator=random)
        how = _Settings.of([Sampling(top_p=1e-9, max_new_tokens=1)] * 200, 50, torch.device("cpu"))
        tokens, log_probs = sample_tokens(logits, how, random)
        assert torch.equal(tokens, logits.argmax(-1))
        assert log_probs.abs().max() == 0

    def test_half_precision_logits_are_scored_in_float32(self):
        logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
        how = _Settings.of([Sampling(max_new_tokens=1)] * 4, 300, torch.device("cpu"))
        tokens, log_probs = sample_tokens(logits, how, None)
        wanted = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert log_probs.dtype == torch.float32
        assert (log_probs - wanted).abs().max() < 1e-5


LOGITS = st.lists(st.integers(-4000, 4000), min_size=2, max_size=40, unique=True).map(lambda v: [x / 500 for x in v])


class TestFilter:
    @settings(max_examples=200, deadline=None)
    @given(logits=LOGITS, top_k=st.integers(1, 45), top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.83, 0.99, 1.0]))
    def test_keeps_what_the_definitions_say(self, logits, top_k, top_p):
        out = filter_logits(torch.tensor([logits]), torch.tensor([[top_k]]), torch.tensor([[top_p]]))[0]
        assert set(torch.isfinite(out).nonzero()[:, 0].tolist()) == kept(logits, top_k, top_p)
        for before, after in zip(torch.tensor(logits).tolist(), out.tolist(), strict=True):
            assert after in (before, float("-inf"))

    @settings(max_examples=50, deadline=None)
    @given(logits=LOGITS, top_k=st.integers(1, 40))
    def test_top_k_is_transformers(self, logits, top_k):
        from transformers import TopKLogitsWarper

        scores = torch.tensor([logits])
        theirs = TopKLogitsWarper(top_k)(None, scores)
        assert torch.equal(filter_logits(scores, torch.tensor([[top_k]]), torch.tensor([[1.0]])), theirs)

    @settings(max_examples=50, deadline=None)
    @given(logits=LOGITS, top_p=st.sampled_from([0.1, 0.37, 0.5, 0.83, 0.97]))
    def test_top_p_is_transformers(self, logits, top_p):
        from transformers import TopPLogitsWarper

        scores = torch.tensor([logits])
        theirs = TopPLogitsWarper(top_p)(None, scores)
        ours = filter_logits(scores, torch.tensor([[len(logits)]]), torch.tensor([[top_p]]))
        assert torch.equal(ours, theirs)

    def test_a_mass_that_is_reached_exactly_is_enough(self):
        out = filter_logits(torch.zeros(1, 4), torch.tensor([[4]]), torch.tensor([[0.5]]))
        assert torch.isfinite(out).sum() == 2

    def test_each_row_has_its_own_filter(self):
        scores = torch.tensor([[3.0, 2.0, 1.0]] * 3)
        out = filter_logits(scores, torch.tensor([[1], [2], [3]]), torch.tensor([[1.0], [1.0], [0.5]]))
        assert torch.isfinite(out).sum(-1).tolist() == [1, 2, 1]
