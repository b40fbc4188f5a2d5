"""Which AutoModel a checkpoint is loaded with: verl's answer without the imports for models that show images."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def text_class_first(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """verl.utils.model.get_hf_auto_model_class, half a second sooner for a text model.

    verl looks for the config in a list of those of all image models, and making the list imports each of them. The
    names behind it say whether it can be there. Where it cannot, verl's function runs with an empty list.
    """
    from verl.utils import model

    def auto_class(hf_config: Any) -> Any:
        images: Any = model.AutoModelForImageTextToText
        if getattr(hf_config, "auto_map", None) or may_hold(images._model_mapping, type(hf_config)):
            return original(hf_config)
        model.AutoModelForImageTextToText = SimpleNamespace(_model_mapping={})
        try:
            return original(hf_config)
        finally:
            model.AutoModelForImageTextToText = images

    return auto_class


def may_hold(mapping: Any, kind: type) -> bool:
    """Whether a config class can be among the keys of transformers' lazy mapping, which this does not make.

    By the class's name, with every model type that has it: `kind in mapping` looks at one of them.
    """
    names = mapping._config_mapping.items()
    return kind in mapping._extra_content or any(
        name == kind.__name__ and model_type in mapping._model_mapping for model_type, name in names
    )
