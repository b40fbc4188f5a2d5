"""Which AutoModel a checkpoint is loaded with: verl's answer without the imports for models that show images."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def text_class_first(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """verl.utils.model.get_hf_auto_model_class, half a second sooner for a text model.

    verl looks for the config in a list of those of all image models, and making the list imports each of them. The
    mapping behind it answers by name. Where that says no, verl's function runs with an empty list.
    """
    from verl.utils import model

    def auto_class(hf_config: Any) -> Any:
        images: Any = model.AutoModelForImageTextToText
        if getattr(hf_config, "auto_map", None) or type(hf_config) in images._model_mapping:
            return original(hf_config)
        model.AutoModelForImageTextToText = SimpleNamespace(_model_mapping={})
        try:
            return original(hf_config)
        finally:
            model.AutoModelForImageTextToText = images

    return auto_class
