"""verl.utils.model.get_hf_auto_model_class with the shim gives what it gives without."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import transformers

from quickstart.plugin.model_class import text_class_first


@pytest.fixture
def classes():
    from verl.utils import model

    return model.get_hf_auto_model_class, text_class_first(model.get_hf_auto_model_class)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3_text", "qwen2_vl", "llava", "bert", "evolla"])
@pytest.mark.parametrize("head", ["ForCausalLM", "ForTokenClassification", "ForConditionalGeneration", "Model"])
def test_the_same_class(classes, kind, head):
    config = transformers.AutoConfig.for_model(kind)
    config.architectures = [f"Some{head}"]
    theirs, ours = classes
    assert ours(config) is theirs(config)


def test_remote_code_that_names_the_class_of_image_models(classes):
    config = transformers.AutoConfig.for_model("qwen2")
    config.architectures = ["Mine"]
    config.auto_map = {"AutoModelForImageTextToText": "mine.Mine"}
    assert [auto(config) for auto in classes] == [transformers.AutoModelForImageTextToText] * 2


def test_no_image_model_is_imported_for_a_text_model():
    """In a process of its own: other tests import many."""
    script = """
        import sys
        import transformers
        from verl.utils import model
        from quickstart.plugin.model_class import text_class_first
        config = transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"])
        before = set(sys.modules)
        assert text_class_first(model.get_hf_auto_model_class)(config) is transformers.AutoModelForCausalLM
        new = [name for name in set(sys.modules) - before if name.startswith("transformers.models.")]
        assert not [name for name in new if "llava" in name or "vl" in name], new
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
