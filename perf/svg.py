# SPDX-License-Identifier: BSD-3-Clause
"""Charts as SVG, with the standard library alone.

    chart = Chart("Time of a token", Axis("tokens", log=2), Axis("time, ns", log=10))
    chart.line("forward", xs, ys)
    chart.level(0.6, "bar")
    open("out.svg", "w").write(figure([chart], columns=1, caption="where and when"))

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; series differ in their markers,
too.
"""

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00")
WIDTH, HEIGHT = 560, 400  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 40, 52
LEGEND_LINE = 17
_STYLE = """text{font-family:Helvetica,Arial,"DejaVu Sans",sans-serif;font-size:12px;fill:#222}
.title{font-size:14px;font-weight:bold}.small{font-size:11px;fill:#555}
.grid{stroke:#e4e4e4;stroke-width:1}.minor{stroke:#f3f3f3;stroke-width:1}.frame{fill:none;stroke:#888;stroke-width:1}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.level{stroke:#888;stroke-width:1.2;stroke-dasharray:5 4}"""


@dataclass
class Axis:
    """An axis of numbers, linear (log = 0) or logarithmic to base 2 or 10, or of categories."""

    label: str
    log: int = 0
    categories: list = None
    low: float = None  # limits; None: those of the data
    high: float = None


@dataclass
class _Series:
    label: str
    xs: list
    ys: list
    colour: str
    marker: int
    dashed: bool
    joined: bool
    marked: bool
    errors: list  # half lengths of bars; None: no bars


@dataclass
class Chart:
    title: str
    x: Axis
    y: Axis
    series: list = field(default_factory=list)
    levels: list = field(default_factory=list)

    def line(self, label, xs, ys, style=None, dashed=False, joined=True, marked=True, errors=None):
        """A series; points that a logarithmic axis cannot show are left out. `style` chooses colour and marker,
        `errors` are drawn as bars from y - error to y + error."""
        points = [
            (self._x(x), y, error)
            for x, y, error in zip(xs, ys, errors or [0] * len(ys))
            if math.isfinite(y) and (not self.y.log or y > 0) and (not self.x.log or x > 0)
        ]
        if not points:
            return
        style = len(self.series) if style is None else style
        self.series.append(
            _Series(
                label,
                [p[0] for p in points],
                [p[1] for p in points],
                COLOURS[style % len(COLOURS)],
                style,
                dashed,
                joined and not self.x.categories,
                marked,
                [p[2] for p in points] if errors else None,
            )
        )

    def level(self, y, label):
        """A horizontal line to compare with."""
        self.levels.append((y, label))

    def _x(self, x):
        return self.x.categories.index(x) if self.x.categories else x

    @property
    def legend_columns(self):
        return 1 if any(len(s.label) > 32 for s in self.series) else 2

    @property
    def height(self):
        return HEIGHT + LEGEND_LINE * math.ceil(len(self.series) / self.legend_columns)


def number(value):
    """For people: 128k, 0.05, 3."""
    if value == 0:
        return "0"
    if value >= 1024 and value == int(value) and int(value) & (int(value) - 1) == 0:  # a power of two
        return f"{int(value) // 1024}k" if value < 1024**2 else f"{int(value) // 1024**2}M"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def ticks(axis, low, high):
    """(position, text or None for a minor one) in the order of their size."""
    if axis.categories:
        return [(i, text) for i, text in enumerate(axis.categories)]
    if axis.log:
        base = axis.log
        first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
        every = max(1, math.ceil((last - first + 1) / 10))
        found = []
        for power in range(first, last + 1):
            found.append((float(base) ** power, number(float(base) ** power) if (power - first) % every == 0 else None))
            if base == 10 and last - first <= 4:
                near = last - first <= 2
                found += [
                    (m * 10.0**power, number(m * 10.0**power) if near and m in (2, 5) else None) for m in range(2, 10)
                ]
        found = [(v, text) for v, text in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if sum(text is not None for _, text in found) >= 2:
            return found
        if len(found) >= 2:
            return [(v, number(v)) for v, _ in found]
        # less than what a logarithm divides: as a linear axis
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (m * step) <= 7)
    return [
        (i * step, number(round(i * step, 12)))
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def limits(axis, values):
    """The range that an axis shows."""
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    low, high = min(values), max(values)
    if axis.log:
        low, high = (low if axis.low is None else axis.low), (high if axis.high is None else axis.high)
        margin = (high / low) ** 0.04 if high > 1.05 * low else axis.log**0.5
        return low / margin, high * margin
    low, high = (min(low, 0) if axis.low is None else axis.low), (high if axis.high is None else axis.high)
    return low, high + 0.06 * ((high - low) or 1)


def _place(axis, low, high, begin, end, value):
    if axis.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return begin + (value - low) / (high - low) * (end - begin)


def _marker(kind, x, y, colour):
    r = 3.4
    shape = kind % 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"/>'
    if shape == 1:
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}" fill="{colour}"/>'
    points = {2: ((0, -4.4), (4, 3), (-4, 3)), 3: ((0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0))}[shape]
    text = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in points)
    return f'<polygon points="{text}" fill="{colour}"/>'


def _text(x, y, text, anchor="middle", kind="", rotate=None):
    turn = f' transform="rotate({rotate} {x:.1f} {y:.1f})"' if rotate is not None else ""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{turn}>{escape(text)}</text>'


def _draw(chart):
    out = [_text(LEFT, 22, chart.title, "start", "title")]
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    if not chart.series:
        return out + [_text((x0 + x1) / 2, (y0 + y1) / 2, "no data", kind="small")]
    shown_levels = [y for y, _ in chart.levels]
    x_low, x_high = limits(chart.x, [x for s in chart.series for x in s.xs])
    y_low, y_high = limits(chart.y, [y for s in chart.series for y in s.ys] + shown_levels)
    at_x = lambda v: _place(chart.x, x_low, x_high, x0, x1, v)
    at_y = lambda v: _place(chart.y, y_low, y_high, y0, y1, v)

    for value, text in ticks(chart.x, x_low, x_high):
        x = at_x(value)
        if not chart.x.categories:
            out.append(f'<line class="{"grid" if text else "minor"}" x1="{x:.1f}" y1="{y0}" x2="{x:.1f}" y2="{y1}"/>')
        for line, part in enumerate(text.split() if chart.x.categories else [text] if text else []):
            out.append(_text(x, y0 + 17 + 14 * line, part))
    for value, text in ticks(chart.y, y_low, y_high):
        y = at_y(value)
        out.append(f'<line class="{"grid" if text else "minor"}" x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}"/>')
        if text:
            out.append(_text(x0 - 7, y + 4, text, "end"))
    out.append(f'<rect class="frame" x="{x0}" y="{y1}" width="{x1 - x0}" height="{y0 - y1}"/>')
    out.append(_text((x0 + x1) / 2, y0 + 38, chart.x.label))
    out.append(_text(17, (y0 + y1) / 2, chart.y.label, rotate=-90))
    for value, text in chart.levels:
        y = at_y(value)
        out.append(f'<line class="level" x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}"/>')
        out.append(_text(x1 - 5, y - 4, text, "end", "small"))

    for s in chart.series:
        points = [(at_x(x), at_y(y)) for x, y in zip(s.xs, s.ys)]
        if s.joined and len(points) > 1:
            dash = ' stroke-dasharray="6 3"' if s.dashed else ""
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline class="line" points="{text}" stroke="{s.colour}"{dash}/>')
        for y, error, (x, _) in zip(s.ys, s.errors or [], points):
            ends = [min(max(v, y_low), y_high) for v in (y - error, y + error)]
            out.append(
                f'<line class="line" x1="{x:.1f}" y1="{at_y(ends[0]):.1f}" x2="{x:.1f}" y2="{at_y(ends[1]):.1f}" '
                f'stroke="{s.colour}" stroke-opacity="0.5"/>'
            )
        if s.marked:
            out += [_marker(s.marker, x, y, s.colour) for x, y in points]
    for i, s in enumerate(chart.series):
        columns = chart.legend_columns
        x, y = LEFT + (i % columns) * (WIDTH - LEFT) / 2, HEIGHT + 6 + LEGEND_LINE * (i // columns)
        dash = ' stroke-dasharray="6 3"' if s.dashed else ""
        if s.joined:
            out.append(f'<line class="line" x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{s.colour}"{dash}/>')
        if s.marked:
            out.append(_marker(s.marker, x + 12, y, s.colour))
        out.append(_text(x + 31, y + 4, s.label, "start"))
    return out


def figure(charts, columns=2, caption=""):
    """The text of an SVG file with these charts."""
    columns = max(1, min(columns, len(charts)))
    heights = [max(chart.height for chart in charts[i : i + columns]) for i in range(0, len(charts), columns)]
    width, height = columns * WIDTH, sum(heights) + 14 + (20 if caption else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, chart in enumerate(charts):
        x, y = (i % columns) * WIDTH, sum(heights[: i // columns])
        out += [f'<g transform="translate({x} {y})">', *_draw(chart), "</g>"]
    if caption:
        out.append(_text(LEFT, height - 12, caption, "start", "small"))
    return "\n".join([*out, "</svg>", ""])
