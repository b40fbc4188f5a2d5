"""The local backend against stock verl on Ray: the same answers, the same rows, every metric of every step.

The stock numbers are in tests/data/ray_reference_*.json, made by scripts/make_ray_reference.py, which needs a cluster
and a minute a case. Here the same cases run in this process.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import local_runs
import pytest
import ray_case

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-5  # absolute below 1, relative above


def fixed_generate(stop_token):
    """Stands for Generator.generate: the answers that the stock run got."""
    from quickstart.plugin.engine import Completion

    answers = ray_case.FixedAnswers(stop_token)

    def generate(self, prompts, sampling, on_tokens=None):
        given = [answers(prompt, s.max_new_tokens) for prompt, s in zip(prompts, sampling, strict=True)]
        reason = "stop"
        return [Completion(token_ids=ids, log_probs=scores, finish_reason=reason) for ids, scores in given]

    return generate


@pytest.fixture(scope="module")
def files(tmp_path_factory, process_variables):
    return ray_case.Files.make(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def local_run(files, tmp_path_factory):
    """Runs a case in this process, once: step -> metrics. `verl` overrides keys."""
    done = {}

    def run(name, **verl):
        from quickstart.plugin.engine import Generator

        key = (name, *verl.items())
        if key not in done:
            config = ray_case.configuration(name, files, tmp_path_factory.mktemp(name), verl=verl)
            stop_token = 1  # <|im_end|> of the tiny tokenizer
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Generator, "generate", fixed_generate(stop_token))
                record = local_runs.run(config)
            steps = record.evaluations | record.updates
            done[key] = {step: ray_case.comparable(metrics) for step, metrics in steps.items()}
        return done[key]

    return run


@pytest.fixture(params=list(ray_case.CASES))
def reference(request):
    """What stock verl on Ray gave for a case."""
    return json.loads((DATA / f"ray_reference_{request.param}.json").read_text())


def worst(ours, reference):
    """(difference, step, metric) of the metric that is furthest off."""
    found = []
    for record in reference["records"]:
        for name, theirs in record["metrics"].items():
            found.append((ray_case.difference(ours[record["step"]][name], theirs), record["step"], name))
    return max(found)


def test_models_are_those_of_the_reference(files, reference):
    assert files.sha256() == reference["weights_sha256"]


def test_reference_was_made_with_the_verl_that_is_installed(reference):
    assert reference["versions"]["verl"] == metadata.version("verl")


def test_same_steps_and_same_metrics(local_run, reference):
    ours = local_run(reference["case"])
    assert sorted(ours) == [record["step"] for record in reference["records"]]
    for record in reference["records"]:
        assert set(ours[record["step"]]) == set(record["metrics"])


def test_every_metric_of_every_step_is_equal(local_run, reference):
    difference, step, name = worst(local_run(reference["case"]), reference)
    assert difference < TOLERANCE, f"step {step}: {name}"


def test_the_numbers_move(reference):
    """Equal constants would prove nothing."""
    first, last = reference["records"][-4]["metrics"], reference["records"][-1]["metrics"]
    moving = [name for name in first if abs(first[name] - last[name]) > 1000 * TOLERANCE]
    assert {"actor/grad_norm", "critic/score/mean", "response_length/mean"} <= set(moving)
    assert len(moving) > len(first) / 3


def test_control_the_tolerance_sees_bf16(local_run):
    """verl's default precision, which `mixed_precision` has to switch off, is far outside of the tolerance."""
    reference = json.loads((DATA / "ray_reference_grpo.json").read_text())
    bf16 = {"actor_rollout_ref.actor.fsdp_config.mixed_precision": None}
    assert worst(local_run("grpo", **bf16), reference)[0] > 100 * TOLERANCE
