"""Axes with ticks, lines, bars and error bars, as SVG text. A picture follows the reader's light or dark setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

COLOURS = ("#2f81f7", "#d1242f", "#1a7f37", "#bf8700", "#8250df", "#0a7ea4", "#bc4c00", "#57606a")
_STYLE = """
text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.faint { fill: #6e7781 }
.axis { stroke: #6e7781; stroke-width: 1; fill: none }
.grid { stroke: #d0d7de; stroke-width: 0.6 }
.whisker { stroke: #24292f; stroke-width: 1.2 }
.ideal { stroke-width: 1; stroke-dasharray: 4 3; stroke-opacity: 0.7 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } .whisker { stroke: #e6edf3 }
}
"""
FAINT = "#6e7781"
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 54, 60


@dataclass
class Axes:
    """A picture of `width` x `height` with both axes from 0 to `most_x` and `most_y`. Points are in their units."""

    title: str
    x_label: str
    y_label: str
    most_x: float
    most_y: float
    width: int = 640
    height: int = 400
    left: int = LEFT  # of what the axes enclose
    legend: list[tuple[str, str]] = field(default_factory=list)
    _drawn: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        return self.left + (self.width - self.left - RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * value / self.most_y

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, dots: bool = False, dashed: bool = False
    ) -> None:
        """Dashed: thin and faint, for what was not measured."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        style = 'class="ideal"' if dashed else 'stroke-width="2"'
        self._drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {style}/>')
        for x, y in points if dots else ():
            self._drawn.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5" fill="{colour}"/>')

    def bar(self, left: float, right: float, value: float, colour: str) -> None:
        x, y = self.x(left), self.y(value)
        size = f'width="{self.x(right) - x:.1f}" height="{self.y(0) - y:.1f}"'
        self._drawn.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')

    def error_bar(self, x: float, low: float, high: float) -> None:
        at, top, bottom = self.x(x), self.y(high), self.y(low)
        ends = "".join(f"M{at - 4:.1f} {end:.1f}h8" for end in (top, bottom))
        self._drawn.append(f'<path class="whisker" d="M{at:.1f} {top:.1f}V{bottom:.1f}{ends}"/>')

    def text(self, x: float, y: float, words: str, *, up: float = 6.0, style: str = "") -> None:
        """Above a point, in its middle."""
        place = f'x="{self.x(x):.1f}" y="{self.y(y) - up:.1f}"'
        self._drawn.append(f'<text {place} text-anchor="middle" class="{style}">{escape(words)}</text>')

    def render(self, x_ticks: Sequence[tuple[float, str]] | None = None, *, slanted: bool = False) -> str:
        """The picture; ticks of x are round numbers unless they are given. `slanted`: their words are long."""
        floor, height = self.y(0), self.height + 18 * len(self.legend) + (70 if slanted else 0)
        drawn = [f'<text x="{self.left}" y="24" class="title">{escape(self.title)}</text>']
        for value in ticks(self.most_y):
            y = self.y(value)
            drawn.append(f'<line class="grid" x1="{self.left}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            drawn.append(
                f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end" class="faint">{number(value)}</text>'
            )
        for value, words in x_ticks or [(value, number(value)) for value in ticks(self.most_x)]:
            x = self.x(value)
            drawn.append(f'<path class="axis" d="M{x:.1f} {floor:.1f}v4"/>')
            turned = f' transform="rotate(-25 {x:.1f} {floor + 18:.1f})"' if slanted else ""
            anchor = "end" if slanted else "middle"
            place = f'x="{x:.1f}" y="{floor + 18:.1f}" text-anchor="{anchor}"'
            drawn.append(f'<text {place} class="faint"{turned}>{escape(words)}</text>')
        drawn += self._drawn
        drawn.append(f'<path class="axis" d="M{self.left} {TOP}V{floor:.1f}H{self.width - RIGHT}"/>')
        drawn.append(f'<text x="{self.left - 60}" y="{TOP - 12}">{escape(self.y_label)}</text>')
        middle = (self.left + self.width - RIGHT) / 2
        below = floor + (110 if slanted else 40 if self.x_label else 24)
        drawn.append(f'<text x="{middle:.1f}" y="{below:.1f}" text-anchor="middle">{escape(self.x_label)}</text>')
        for i, (words, colour) in enumerate(self.legend):
            y = below + 24 + 18 * i
            drawn.append(f'<rect x="{self.left}" y="{y - 9:.1f}" width="12" height="10" fill="{colour}"/>')
            drawn.append(f'<text x="{self.left + 20}" y="{y:.1f}">{escape(words)}</text>')
        size = f'width="{self.width}" height="{height}" viewBox="0 0 {self.width} {height}"'
        body = "\n".join(drawn)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


def round_up(value: float) -> float:
    """The end of an axis that shows `value`: a little more, and a round number."""
    step = tick_step(value * 1.08 or 1.0)
    return math.ceil(value * 1.08 / step) * step or 1.0


def tick_step(most: float) -> float:
    """1, 2 or 5 times a power of ten, so that an axis has four to ten ticks."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (0.1, 0.2, 0.5, 1.0) if most / (step * power) <= 10)


def ticks(most: float) -> list[float]:
    step = tick_step(most)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
