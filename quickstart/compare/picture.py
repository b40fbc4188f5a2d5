"""The curves as a PNG, for a chat or a paper. The only part that needs matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from quickstart.compare.chart import FEW, style
from quickstart.compare.reading import CURVES, Curve, Run

COLUMNS = 3
INCHES = (4.6, 3.0)  # of one drawing


def picture(runs: Sequence[Run]) -> bytes:
    """PNG of all quantities that any run has."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [curve for curve in CURVES if any(run.curves.get(curve.key) for run in runs)]
    across = min(COLUMNS, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(INCHES[0] * across, INCHES[1] * down + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, curve in enumerate(shown, start=1):
        axes = figure.add_subplot(down, across, place)
        axes.set_title(title(curve, runs), fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        for index, run in enumerate(runs):
            draw(axes, run, curve.key, index)
    handles = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    # a leading underscore hides a label from matplotlib's legend; dollar signs would be read as formulas
    labels = [str(label).replace("$", r"\$") for label in handles]
    figure.legend(list(handles.values()), labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize=8)
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a Chinese folder's name: its font has boxes for it
        figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def title(curve: Curve, runs: Sequence[Run]) -> str:
    """Of one drawing; says what rings are where there are any."""
    if curve.key != "reward" or not any(run.sampled for run in runs):
        return curve.title
    return f"{curve.title}\nlines: rollouts; rings: few greedy samples, before and after"


def draw(axes: object, run: Run, key: str, index: int) -> None:
    """One run's curve."""
    points = run.curves.get(key)
    if not points:
        return
    colour, dash = style(index)
    pattern = {"": "-", "6 3": "--", "2 3": ":"}[dash]
    size, look = 3, {"linestyle": pattern, "marker": "o" if len(points) <= FEW else ""}
    if run.sampled and key == "reward":
        size, look = 6, {"linestyle": "none", "marker": "o", "markerfacecolor": "none"}
    steps, values = zip(*points, strict=True)
    axes.plot(  # type: ignore[attr-defined]
        steps, values, color=colour, markersize=size, linewidth=1.4, label=run.name, **look
    )
