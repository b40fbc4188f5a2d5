"""Curves of several runs as one SVG drawing. Plain lines, an axis with round numbers, nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from html import escape

from quickstart.compare.reading import Points

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
# Okabe and Ito's colours, which people with colour blindness can tell apart; dashes when there are more runs than that.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "6 3", "2 3")
FEW = 12  # points that are marked


def style(index: int) -> tuple[str, str]:
    """Colour and dash pattern of a run."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low to high."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short, without an exponent where that is readable."""
    return f"{value:.4g}"


def draw(curves: Mapping[str, Points], order: list[str], rings: Collection[str] = ()) -> str:
    """The curves by run name.

    Args:
        curves: points of each run.
        order: names of all runs, so that a run has one colour in every drawing.
        rings: runs whose points no line may join.
    """
    points = [point for curve in curves.values() for point in curve]
    across = ticks(min(p[0] for p in points), max(p[0] for p in points))
    across = [tick for tick in across if tick == int(tick)]
    up = ticks(min(p[1] for p in points), max(p[1] for p in points))

    def x(step: float) -> float:
        return LEFT + (step - across[0]) / ((across[-1] - across[0]) or 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - up[0]) / (up[-1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in up:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in across:
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 1}" text-anchor="middle">step</text>')
    for name, curve in curves.items():
        shape = dots if name in rings else line
        parts.append(shape(name, [(x(step), y(value)) for step, value in curve], order.index(name)))
    return "\n".join([*parts, "</svg>"])


def line(name: str, places: list[tuple[float, float]], index: int) -> str:
    """One curve; few points are marked, since a line of one point cannot be seen."""
    colour, dash = style(index)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shown = places if len(places) <= FEW else []
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in shown)
    stroke = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
    return f'<g><title>{escape(name)}</title><polyline points="{path}" {stroke}/>{marks}</g>'


def dots(name: str, places: list[tuple[float, float]], index: int) -> str:
    """Rings that nothing joins: what lies between them was not measured."""
    colour, _ = style(index)
    look = f'r="4.5" fill="none" stroke="{colour}" stroke-width="1.8"'
    rings = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}/>' for x, y in places)
    return f"<g><title>{escape(name)}</title>{rings}</g>"
