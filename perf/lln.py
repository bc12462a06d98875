#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The tables and charts of LLN attention: what theory says against what was measured, concentration, times.

    perf/lln.py FILE.json ... [--write-docs]

The files are those of `linattn moments --study`, of `linattn diagnose --study`, with --real or without, and of one or
several runs of perf/attention, perf/moments and perf/diagnose (one for each number of threads). --write-docs puts the
tables into docs/lln.md, between their marks, and the charts into docs/plots; it needs all of them.

A missed bar is no error: the last line counts them, and the exit status is 0. It is 2 if a file cannot be used.
"""

import argparse
import json
import math
import pathlib
import sys
from dataclasses import dataclass

import bars
import plot
import results
from bars import MISSING, Line, TYPE_NAMES, markdown_table
from svg import Axis, Chart, figure

MOMENTS_OVER_TRIAD = 0.8
FEATURES_EFF = 0.3
TABLE_RULE = 0.07  # error of the log-variance, sigma 0.8 to 1.8

RULES = {"authors": "authors", "fit": "fit on [6, 20]", "table": "table", "entropy": "entropy"}
KERNELS = {
    "softmax": "SA",
    "lln_authors": "LLN, authors",
    "lln_table": "LLN, table",
    "lln_entropy": "LLN, entropy",
    "quadratic": "quadratic",
    "relu": "ReLU",
    "elu": "elu + 1",
}
STYLES = {name: i for i, name in enumerate(KERNELS)}
HISTOGRAMS = ("SA", "LLN, alpha = beta = 1", "LLN, authors", "LLN, table")


# ---- files -----------------------------------------------------------------------------------------------------------


OTHER_EXTENTS = (IndexError, TypeError, ValueError, ZeroDivisionError)  # what a study of another shape leads to


@dataclass(frozen=True)
class Study:
    """The numbers of a study by their path, such as softmax/log_variance; None where one is no number."""

    path: str
    command: str
    data: dict

    def __getitem__(self, name):
        found = self.data
        for part in name.split("/"):
            if not isinstance(found, dict) or part not in found:
                raise results.UnusableFile(f"{self.path}: has no {name}; is the file from another version?")
            found = found[part]
        return found

    def __contains__(self, name):
        try:
            return self[name] is not None
        except results.UnusableFile:
            return False


def load(path):
    """A Study, or the results of a benchmark program. Raises UnusableFile."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        data = None
    if isinstance(data, dict) and "command" in data and "linattn" in data:
        if data["command"] not in ("moments", "diagnose") or not isinstance(data.get("study"), dict):
            raise results.UnusableFile(f"{path}: not a study of linattn moments or linattn diagnose")
        return Study(str(path), data["command"], data["study"])
    return results.load(path)


def mean(values):
    return sum(values) / len(values) if values and None not in values else math.nan


def spread(values):
    """Standard deviation."""
    if len(values) < 2 or None in values:
        return 0.0
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def flat(rows):
    return [value for row in rows for value in row]


def of_curve(study, name, instrument):
    """Means over the draws at each temperature, and the deviations between draws."""
    rows = study[f"{name}/{instrument}"]
    return [mean(row) for row in rows], [spread(row) for row in rows]


def share(study, name):
    """The biased part over the whole, at each temperature."""
    biased, unbiased = (of_curve(study, name, f"entropy_{part}")[0] for part in ("biased", "unbiased"))
    return [b / (b + u) for b, u in zip(biased, unbiased)]


def apart(points):
    """Their xs and their ys."""
    return [x for x, _ in points], [y for _, y in points]


def close(value, among):
    """Its place in a list of numbers."""
    found = min(range(len(among)), key=lambda i: abs(among[i] - value))
    if abs(among[found] - value) > 1e-9:
        raise results.UnusableFile(f"a study has no value at {value}; is the file from another version?")
    return found


# ---- numbers as text -------------------------------------------------------------------------------------------------


def percent(value, digits=1):
    return f"{100 * value:+.{digits}f} %"


def short(value, digits=3):
    """With so many digits that mean something."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def fixed(value, digits=3):
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


# ---- Prop 3.1 --------------------------------------------------------------------------------------------------------


def softmax_markdown(m):
    ds = [int(d) for d in m["softmax/d"]]
    middle = close(64, ds)
    heads = ["sigma_q = sigma_k", "sigma_sm^2", "with finite D", "measured", "within rows"]
    for d in ds:
        heads += [f"D = {d}: over Prop. 3.1", "over finite D"]
    lines = []
    for i, sigma in enumerate(m["softmax/sigma"]):
        at = lambda name, d: m[f"softmax/{name}"][d][i]
        cells = [
            f"{sigma:g}",
            short(at("prop_3_1", middle), 4),
            short(at("finite_d", middle), 4),
            f"{short(at('log_variance', middle), 4)} ± {short(at('log_variance_error', middle), 1)}",
            short(at("within", middle), 4),
        ]
        for d in range(len(ds)):
            for theory in ("prop_3_1", "finite_d"):
                cells.append(percent(at("log_variance", d) / at(theory, d) - 1))
        lines.append(cells)
    return markdown_table(heads, lines)


def cross_markdown(m):
    lines = [
        [f"{rho:g}", *(fixed(m[f"cross/{name}"][i]) for name in ("predicted", "logit_variance", "c_cross"))]
        for i, rho in enumerate(m["cross/rho"])
    ]
    heads = ["correlation", "sigma_sm^2 with C_cross", "variance of the logits", "C_cross, measured"]
    return markdown_table(heads, lines)


def softmax_charts(m):
    absolute = Chart(
        "Log-variance of softmax attention", Axis("sigma_q^2 sigma_k^2", log=10), Axis("Var(ln P)", log=10)
    )
    ratio = Chart(
        "The same over Prop. 3.1", Axis("sigma_q^2 sigma_k^2", log=10), Axis("Var(ln P) / sigma_sm^2", low=0.95)
    )
    for i, d in enumerate(m["softmax/d"]):
        x, y, error = (m[f"softmax/{name}"][i] for name in ("prop_3_1", "log_variance", "log_variance_error"))
        grid = [min(x) * (max(x) / min(x)) ** (n / 40) for n in range(41)]
        if i == 0:
            absolute.line("Prop. 3.1", grid, grid, style=6, dashed=True, marked=False)
        absolute.line(f"measured, D = {d:.0f}", x, y, style=i, joined=False)
        ratio.line(
            f"measured, D = {d:.0f}",
            x,
            [v / s for v, s in zip(y, x)],
            style=i,
            joined=False,
            errors=[e / s for e, s in zip(error, x)],
        )
        ratio.line(f"1 + sigma_sm^2 / 2D, D = {d:.0f}", grid, [1 + s / (2 * d) for s in grid], i, marked=False)
    ratio.level(1, "Prop. 3.1")
    return [absolute, ratio]


# ---- Prop 4.1 --------------------------------------------------------------------------------------------------------


def lln_markdown(m):
    ds = [int(d) for d in m["lln/d"]]
    middle = close(64, ds)
    lines = []
    for i, st2 in enumerate(m["lln/st2"]):
        cells = [f"{st2:g}", short(m["lln/romeo"][middle][i])]
        for d in range(len(ds)):
            cells += [short(m[f"lln/{name}"][d][i]) for name in ("fenton", "log_variance_numerator", "log_variance")]
        cells.append(short(m["lln/within"][middle][i]))
        lines.append(cells)
    heads = ["st2", "line of the authors"]
    for d in ds:
        heads += [f"D = {d}: Fenton", "Var(ln w)", "Var(ln P)"]
    return markdown_table([*heads, "D = 64: within rows"], lines)


def lln_charts(m):
    found = []
    for name, title, symbol in (
        ("log_variance_numerator", "Numerator of LLN attention", "Var(ln w)"),
        ("log_variance", "Matrix of LLN attention", "Var(ln P)"),
    ):
        chart = Chart(title, Axis("st2", log=10), Axis(symbol, log=10, low=0.003, high=30))
        for i, d in enumerate(m["lln/d"]):
            x = m["lln/st2"]
            y, errors = m[f"lln/{name}"][i], m[f"lln/{name}_error"][i]
            chart.line(f"measured, D = {d:.0f}", x, y, style=i, joined=False, errors=errors)
            grid = [min(x) * (10 / min(x)) ** (n / 60) for n in range(61)]
            fenton = [math.log1p(math.expm1(s) / d) for s in grid]
            chart.line(f"Fenton, D = {d:.0f}", grid, fenton, style=i, dashed=True, marked=False)
        at = [(x, y) for x, y in zip(m["lln/st2"], m["lln/romeo"][0]) if y > 0]
        slope = (at[-1][1] - at[0][1]) / (at[-1][0] - at[0][0])
        grid = [2.45 * (70 / 2.45) ** (n / 60) for n in range(61)]
        chart.line(
            "line of the authors (Romeo)", grid, [at[0][1] + slope * (s - at[0][0]) for s in grid], 6, marked=False
        )
        found.append(chart)
    return found


def line_rows(m):
    """(D, first, last, of the numerator, slope, intercept, R^2)."""
    for i, d in enumerate(m["lines/d"]):
        for j, (first, last, numerator) in enumerate(zip(m["lines/first"], m["lines/last"], m["lines/numerator"])):
            yield d, first, last, numerator, *(m[f"lines/{name}"][i][j] for name in ("slope", "intercept", "r2"))


def lines_markdown(m):
    lines = [
        [
            f"{d:.0f}",
            f"{'Var(ln w)' if numerator else 'Var(ln P)'} on [{first:g}, {last:g}]",
            fixed(slope, 4),
            fixed(intercept, 3),
            fixed(r2, 4),
            fixed(math.sqrt((1 - intercept) / slope / 2), 2),
        ]
        for d, first, last, numerator, slope, intercept, r2 in line_rows(m)
    ]
    return markdown_table(["D", "regression of", "a", "b", "R^2", "alpha = beta at sigma_q = sigma_k = 1"], lines)


def lines_charts(m):
    steep = Chart("Regression of Var(ln w) on [4, 9.5]", Axis("st2"), Axis("Var(ln w)"))
    rest = Chart(
        "What a line leaves, D = 64", Axis("st2", log=2), Axis("measured over line - 1, %", low=-20, high=40)
    )
    st2 = m["lln/st2"]
    for d, first, last, numerator, slope, intercept, _ in line_rows(m):
        i = close(d, m["lln/d"])
        if numerator:
            points = [(x, y) for x, y in zip(st2, m["lln/log_variance_numerator"][i]) if x <= 20]
            steep.line(f"measured, D = {d:.0f}", *apart(points), style=i, joined=False)
            ends = [0.5 - intercept / slope / 2, 20] if intercept > 0 else [-intercept / slope, 20]
            steep.line(
                f"a = {slope:.4f}, b = {intercept:.3f}",
                ends,
                [intercept + slope * x for x in ends],
                style=i,
                dashed=True,
                marked=False,
            )
        if d == 64:
            measured = m[f"lln/log_variance{'_numerator' if numerator else ''}"][i]
            points = [
                (x, 100 * (y / (intercept + slope * x) - 1))
                for x, y in zip(st2, measured)
                if intercept + slope * x > 0 and abs(y / (intercept + slope * x) - 1) <= 0.4
            ]
            rest.line(f"{'ln w' if numerator else 'ln P'}, line on [{first:g}, {last:g}]", *apart(points))
    rest.level(0, "")
    return [steep, rest]


# ---- matching --------------------------------------------------------------------------------------------------------


def matching_markdown(m, same):
    group = 0 if same else 1
    lines = []
    for i, sigma in enumerate(m["matching/sigma"]):
        sm2 = sigma**4 if same else sigma**2
        cells = [f"{sigma:g}", short(sm2)]
        cells += [percent(value) for value in m["matching/log_variance_error"][group][i]]
        cells.append(percent(m["matching/numerator_error"][group][i][0]))
        cells.append(fixed(m["matching/softmax_entropy"][group][i], 2))
        cells += [fixed(value, 2) for value in m["matching/entropy"][group][i]]
        lines.append(cells)
    names = list(m["rules"])
    heads = ["sigma" if same else "sigma_q", "sigma_sm^2", *(f"{name}: Var(ln P)" for name in names)]
    return markdown_table([*heads, "authors: Var(ln w)", "entropy of SA", *names], lines)


def matching_charts(m):
    found = []
    for group, title, label in (
        (0, "Matching, sigma_q = sigma_k", "sigma_q = sigma_k"),
        (1, "Matching, sigma_k = 1", "sigma_q"),
    ):
        chart = Chart(title, Axis(label, low=0.75), Axis("Var(ln P) of LLN over SA - 1, %", low=-70, high=45))
        for r, rule in enumerate(m["rules"]):
            errors = [100 * row[r] for row in m["matching/log_variance_error"][group]]
            chart.line(RULES[rule], m["matching/sigma"], errors, style=r)
        numerator = [100 * row[0] for row in m["matching/numerator_error"][group]]
        chart.line("authors, Var(ln w) over sigma_sm^2", m["matching/sigma"], numerator, style=0, dashed=True)
        chart.level(0, "")
        found.append(chart)
    return found


# ---- concentration ---------------------------------------------------------------------------------------------------


def temperature_markdown(d, instrument, digits):
    lines = []
    for i, (sigma, tau) in enumerate(zip(d["sigma_sm"], d["temperature"])):
        cells = [f"{sigma:g}", f"{tau:.2f}", fixed(d[f"lognormal/{instrument}"][i], digits)]
        for name in KERNELS:
            middle, deviation = of_curve(d, name, instrument)
            text = fixed(middle[i], digits)
            cells.append(f"{text} ± {fixed(deviation[i], 2)}" if deviation[i] >= 0.02 else text)
        lines.append(cells)
    return markdown_table(["sigma_sm", "tau", "log-normal", *KERNELS.values()], lines)


def temperature_charts(d):
    n = d["tokens"]
    found = []
    for instrument, title, label in (
        ("entropy", f"Entropy against temperature, N = {n}, D = {d['head_dimension']}", "mean row entropy, bits"),
        ("spectral_gap", f"Spectral gap against temperature, N = {n}, D = {d['head_dimension']}", "1 - |lambda_2|"),
    ):
        low = min(2.0, min(of_curve(d, "lln_authors", instrument)[0])) if instrument == "entropy" else 0
        chart = Chart(title, Axis("temperature of softmax attention, 1 / sigma_sm", log=10), Axis(label, low=low))
        for name, text in KERNELS.items():
            middle, deviation = of_curve(d, name, instrument)
            # dashed where another one lies beneath
            chart.line(text, d["temperature"], middle, style=STYLES[name], dashed=name == "relu", errors=deviation)
        points = [
            (x, y) for x, y in zip(d["temperature"], d[f"lognormal/{instrument}"]) if 1 / x <= 1.81 and y >= low
        ]
        chart.line("SA, log-normal theory", *apart(points), style=7, dashed=True, marked=False)
        found.append(chart)
    return found


def split_markdown(d):
    names = ("softmax", "lln_authors", "lln_table", "lln_entropy", "quadratic", "relu", "elu")
    lines = []
    for i, sigma in enumerate(d["sigma_sm"]):
        cells = [f"{sigma:g}"]
        for name in names:
            biased, unbiased = (of_curve(d, name, f"entropy_{part}")[0][i] for part in ("biased", "unbiased"))
            text = f"{fixed(biased)} + {fixed(unbiased)}"
            cells.append(f"{text} ({100 * biased / (biased + unbiased):.0f} %)" if not name.startswith("q") else text)
        lines.append(cells)
    return markdown_table(["sigma_sm", *(KERNELS[name] for name in names)], lines)


def split_charts(d):
    found = []
    x = Axis("temperature of softmax attention, 1 / sigma_sm", log=10)
    for part, title in (("unbiased", "Unbiased part: each row its own keys"), ("biased", "Biased part: the same keys")):
        chart = Chart(title, x, Axis("bits", log=10, low=0.001, high=6))
        for name, text in KERNELS.items():
            middle, _ = of_curve(d, name, f"entropy_{part}")
            points = [(t, y) for t, y in zip(d["temperature"], middle) if y >= 0.001]
            chart.line(text, *apart(points), style=STYLES[name])
        found.append(chart)
    return found


# ---- histograms ------------------------------------------------------------------------------------------------------


def histograms_markdown(m):
    names = ("mean", "deviation", "skewness", "excess_kurtosis")
    lines = [
        [name, *(fixed(m[f"histograms/{what}"][i], 2) for what in names)] for i, name in enumerate(HISTOGRAMS)
    ]
    return markdown_table(["", "mean of ln(N P)", "deviation", "skewness", "excess kurtosis"], lines)


def histogram_charts(m):
    edges = m["histograms/edges"]
    middles = [(a + b) / 2 for a, b in zip(edges, edges[1:])]
    found = []
    for title, curves, low, high in (
        ("Before matching, sigma_q = sigma_k = 1, D = 64", (0, 1), -5, 3),
        ("After matching", (0, 2, 3), -5, 3),
    ):
        chart = Chart(title, Axis("ln(N P)", low=low, high=high), Axis("density"))
        for curve in curves:
            points = [(x, y) for x, y in zip(middles, m["histograms/density"][curve]) if low <= x <= high]
            chart.line(HISTOGRAMS[curve], *apart(points), style=curve, marked=False)
            middle, width = m["histograms/mean"][curve], m["histograms/deviation"][curve]
            normal = lambda x: math.exp(-(((x - middle) / width) ** 2) / 2) / width / math.sqrt(2 * math.pi)
            grid = [low + (high - low) * i / 160 for i in range(161)]
            chart.line("normal of its moments", grid, list(map(normal, grid)), style=curve, dashed=True, marked=False)
        found.append(chart)
    return found


# ---- real heads ------------------------------------------------------------------------------------------------------


def real_heads(d):
    """Heads in the order of sigma_q sigma_k, and their sigma_sm^2."""
    sm2 = [(q * k) ** 2 for q, k in zip(d["real/sigma_q"], d["real/sigma_k"])]
    heads = len(d["real/softmax/entropy"][0])
    group = heads // len(sm2)
    order = sorted(range(heads), key=lambda h: sm2[h // group])
    return order, [sm2[h // group] for h in range(heads)], [d["real/cross"][h // group] for h in range(heads)]


def of_heads(d, name, instrument):
    """Means over the sequences for each head."""
    rows = d[f"{name}/{instrument}"]
    return [mean([row[h] for row in rows]) for h in range(len(rows[0]))]


def real_markdown(d):
    order, sm2, cross = real_heads(d)
    features = d["real_extents/d"]
    columns = [
        ("real/softmax", "logvar", 2),
        ("real_gaussian/softmax", "logvar", 2),
        ("real/softmax", "log_skewness", 2),
        ("real/softmax", "log_kurtosis", 1),
    ]
    pairs = [("lln_authors", ""), ("lln_authors", "_tensor"), ("lln_table", ""), ("lln_table", "_tensor")]
    lines = []
    for h in order:
        cells = [str(h), fixed(sm2[h], 2), fixed(cross[h], 3), fixed(sm2[h] + sm2[h] ** 2 / (2 * features), 2)]
        cells += [fixed(of_heads(d, name, instrument)[h], digits) for name, instrument, digits in columns]
        softmax = of_heads(d, "real/softmax", "logvar")[h]
        for name, scope in pairs:
            cells.append(percent(of_heads(d, f"real/{name}{scope}", "logvar")[h] / softmax - 1, 0))
        for name in ("real/softmax", "real_gaussian/softmax", "real/lln_table"):
            cells.append(fixed(of_heads(d, name, "entropy")[h], 2))
        for name in ("real/softmax", "real_gaussian/softmax", "real/lln_table"):
            cells.append(fixed(of_heads(d, name, "spectral_gap")[h], 2))
        lines.append(cells)
    heads = ["head", "sigma_sm^2", "C_cross", "finite D", "Var(ln P) of SA", "of Gaussian", "skewness", "kurtosis"]
    heads += ["LLN authors, head", "tensor", "table, head", "tensor"]
    heads += ["entropy SA", "Gaussian", "LLN table", "gap SA", "Gaussian", "LLN table"]
    return markdown_table(heads, lines)


def real_means_markdown(d):
    """Means over sequences and heads, of every kernel."""
    lines = []
    names = ["softmax"]
    for name in ("lln_authors", "lln_table", "lln_entropy"):
        names += [name, f"{name}_tensor"]
    for name in [*names, "quadratic", "relu", "elu"]:
        text = KERNELS[name.removesuffix("_tensor")]
        if name.startswith("lln"):
            text += ", tensor" if name.endswith("_tensor") else ", head"
        cells = [text]
        for group in ("real", "real_gaussian"):
            for instrument in ("logvar", "entropy", "entropy_biased", "entropy_unbiased", "spectral_gap"):
                cells.append(fixed(mean(flat(d[f"{group}/{name}/{instrument}"])), 2))
        lines.append(cells)
    columns = ["Var(ln P)", "entropy", "biased", "unbiased", "gap"]
    return markdown_table(["", f"real: {columns[0]}", *columns[1:], f"Gaussian: {columns[0]}", *columns[1:]], lines)


def real_charts(d):
    order, sm2, _ = real_heads(d)
    features = d["real_extents/d"]
    names = [str(h) for h in order]

    def chart(title, label, **limits):
        return Chart(title, Axis("head, in the order of sigma_q sigma_k", categories=names), Axis(label, **limits))

    def add(to, label, values, **style):
        to.line(label, names, [values[h] for h in order], **style)

    variance = chart("Log-variance of softmax attention", "Var(ln P)")
    add(variance, "real q, k", of_heads(d, "real/softmax", "logvar"), style=0)
    add(variance, "Gaussian q, k", of_heads(d, "real_gaussian/softmax", "logvar"), style=4)
    add(variance, "Prop. 3.1, finite D", [s + s * s / (2 * features) for s in sm2], style=6)

    shape = chart("How normal is ln P?", "skewness, excess kurtosis", low=-1)
    for group, text, style in (("real", "real", 0), ("real_gaussian", "Gaussian", 4)):
        add(shape, f"skewness, SA, {text}", of_heads(d, f"{group}/softmax", "log_skewness"), style=style)
        add(shape, f"kurtosis, SA, {text}", of_heads(d, f"{group}/softmax", "log_kurtosis"), style=style + 1)
    add(shape, "skewness, LLN table, real", of_heads(d, "real/lln_table", "log_skewness"), style=2)
    add(shape, "kurtosis, LLN table, real", of_heads(d, "real/lln_table", "log_kurtosis"), style=3)
    shape.level(0, "")

    errors = []
    for group, name, text, style in (
        ("real", "lln_authors", "authors, head", 1),
        ("real", "lln_authors_tensor", "authors, tensor", 4),
        ("real", "lln_table", "table, head", 2),
        ("real", "lln_table_tensor", "table, tensor", 3),
        ("real_gaussian", "lln_table", "table, head, Gaussian", 6),
    ):
        ours, exact = of_heads(d, f"{group}/{name}", "logvar"), of_heads(d, f"{group}/softmax", "logvar")
        errors.append((text, [100 * (a / b - 1) for a, b in zip(ours, exact)], style))
    lowest = min(value for _, values, _ in errors for value in values)
    matching = chart("Matched LLN over softmax attention", "Var(ln P) of LLN over SA - 1, %", low=min(0, 1.1 * lowest))
    for text, values, style in errors:
        add(matching, text, values, style=style)
    matching.level(0, "")

    found = [variance, shape, matching]
    for instrument, title, label, limits in (
        ("entropy", "Entropy", "mean row entropy, bits", {"low": 2}),
        ("spectral_gap", "Spectral gap", "1 - |lambda_2|", {"low": 0, "high": 1}),
        ("entropy_biased", "Biased part", "bits", {}),
    ):
        c = chart(title, label, **limits)
        for group, name, text, style in (
            ("real", "softmax", "SA, real", 0),
            ("real_gaussian", "softmax", "SA, Gaussian", 4),
            ("real", "lln_table", "LLN, table, real", 2),
            ("real_gaussian", "lln_table", "LLN, table, Gaussian", 6),
            ("real", "lln_entropy", "LLN, entropy, real", 3),
            ("real", "quadratic", "quadratic, real", 5),
        ):
            add(c, text, of_heads(d, f"{group}/{name}", instrument), style=style)
        found.append(c)
    return found


# ---- claims ----------------------------------------------------------------------------------------------------------


def largest(values):
    return max(values, key=abs)


def claims_markdown(m, d):
    """What the paper says, and what the studies found; every number is one of theirs."""
    middle, sigmas = close(64, m["softmax/d"]), m["softmax/sigma"]
    over = lambda theory: [
        a / b - 1 for a, b in zip(m["softmax/log_variance"][middle], m[f"softmax/{theory}"][middle])
    ]
    st2, of_64 = m["lln/st2"], close(64, m["lln/d"])
    fenton = lambda name, s: m["lln/fenton"][of_64][close(s, st2)] / m[f"lln/{name}"][of_64][close(s, st2)] - 1
    errors = lambda rule, name="log_variance_error": [
        row[m["rules"].index(rule)] for group in m[f"matching/{name}"] for row in group
    ]
    span = lambda values, digits=0: f"{percent(min(values), digits)} to {percent(max(values), digits)}"
    one = close(1.0, d["sigma_sm"])
    entropy = {name: of_curve(d, name, "entropy")[0] for name in KERNELS}
    change = lambda name: max(entropy[name]) - min(entropy[name])
    falls = lambda y: all(a > b for a, b in zip(y, y[1:]))  # with sigma_sm, so that it rises with temperature
    monotone = "at every step" if falls(entropy["softmax"]) and falls(entropy["lln_authors"]) else "not at every step"
    lines = [
        [
            "softmax attention has Var(ln P) = sigma_sm^2 (Prop. 3.1)",
            f"D = 64: {percent(over('prop_3_1')[close(1.0, sigmas)])} at sigma_sm^2 = 1, "
            f"{percent(over('prop_3_1')[-1])} at {m['softmax/prop_3_1'][middle][-1]:.1f}; with sigma_sm^4 / 2D at most "
            f"{percent(largest(over('finite_d')))}",
        ],
        [
            "softmax attention is log-normal",
            f"skewness {m['histograms/skewness'][0]:+.2f}, excess kurtosis {m['histograms/excess_kurtosis'][0]:+.2f} "
            "at sigma_q = sigma_k = 1",
        ],
        [
            "LLN attention is log-normal, and its log-variance is Fenton's for moderate st2 (Prop. 4.1)",
            "Fenton over Var(ln w), D = 64: "
            + ", ".join(f"{percent(fenton('log_variance_numerator', s), 0)} at st2 = {s}" for s in (1, 2, 4))
            + f"; over Var(ln P): {percent(fenton('log_variance', 1), 0)} at 1. Matched, skewness "
            f"{m['histograms/skewness'][2]:+.2f}, excess kurtosis {m['histograms/excess_kurtosis'][2]:+.2f}",
        ],
        [
            "its log-variance is a line in st2 for large st2 (Romeo)",
            "R^2 of the regressions "
            f"{min(m['lines/r2'][i][j] for i in range(3) for j in range(3)):.3f} to "
            f"{max(m['lines/r2'][i][j] for i in range(3) for j in range(3)):.3f}; the slope of ln P at D = 64 is "
            f"{m['lines/slope'][of_64][1]:.3f} on [6, 20], {m['lines/slope'][of_64][2]:.3f} on [6, 58]",
        ],
        [
            "moment matching gives LLN the log-variance of softmax attention",
            f"sigma 0.8 to 1.8, D = 64, Var(ln P): authors {span(errors('authors'))}, fit {span(errors('fit'))}, "
            f"table {span(errors('table'), 1)}; authors, Var(ln w) against sigma_sm^2: "
            f"{span(errors('authors', 'numerator_error'))}",
        ],
        [
            "entropy and spectral gap of LLN rise with temperature, as those of softmax attention",
            f"entropy rises {monotone}, by {change('softmax'):.1f} bits (SA) and {change('lln_authors'):.1f} (LLN, "
            f"authors); at sigma_sm = 1 entropy {entropy['softmax'][one]:.2f} and {entropy['lln_authors'][one]:.2f}, "
            f"gap {of_curve(d, 'softmax', 'spectral_gap')[0][one]:.2f} and "
            f"{of_curve(d, 'lln_authors', 'spectral_gap')[0][one]:.2f}",
        ],
        [
            "entropy and gap of quadratic and ReLU kernels do not react",
            f"entropy changes by {change('quadratic'):.3f} and {change('relu'):.3f} bits "
            f"(elu + 1: {change('elu'):.3f})",
        ],
        [
            "the concentration of LLN is unbiased",
            f"of what it loses against log2 N at sigma_sm = 1, {100 * share(d, 'lln_authors')[one]:.0f} % (authors) "
            f"and {100 * share(d, 'lln_table')[one]:.0f} % (table) is biased; of softmax attention "
            f"{100 * share(d, 'softmax')[one]:.0f} %",
        ],
    ]
    if "real" in d:
        order, sm2, _ = real_heads(d)
        features = d["real_extents/d"]
        excess = [
            v / (s + s * s / (2 * features)) - 1 for v, s in zip(of_heads(d, "real/softmax", "logvar"), sm2)
        ]
        skewness, kurtosis = (of_heads(d, "real/softmax", f"log_{what}") for what in ("skewness", "kurtosis"))
        ratio = [
            a / b - 1
            for a, b in zip(of_heads(d, "real/lln_table", "logvar"), of_heads(d, "real/softmax", "logvar"))
        ]
        bits = lambda name, part: mean(flat(d[f"real/{name}/entropy_{part}"]))
        part = lambda name: 100 * bits(name, "biased") / (bits(name, "biased") + bits(name, "unbiased"))
        lines += [
            [
                f"Prop. 3.1 for {len(order)} heads of a trained encoder",
                f"Var(ln P) of softmax attention over sigma_sm^2 + sigma_sm^4 / 2D: {span(excess)}; skewness "
                f"{min(skewness):+.2f} to {max(skewness):+.2f}, excess kurtosis {min(kurtosis):+.1f} to "
                f"{max(kurtosis):+.1f}",
            ],
            [
                "moment matching for them",
                f"Var(ln P) of LLN by the table of each head over softmax attention: {span(ratio)}; means of the "
                f"entropy {mean(of_heads(d, 'real/lln_table', 'entropy')):.2f} and "
                f"{mean(of_heads(d, 'real/softmax', 'entropy')):.2f} bits",
            ],
            [
                "unbiased concentration of them",
                f"biased is {part('softmax'):.0f} % of what softmax attention loses against log2 N, "
                f"{part('lln_authors'):.0f} % (authors) and {part('lln_table'):.0f} % (table) of what LLN loses",
            ],
        ]
    return markdown_table(["the paper", "measured"], lines)


# ---- times -----------------------------------------------------------------------------------------------------------


def bar_lines(files):
    lines = bars.lln_lines(files)
    shapes = {}
    for file in files:
        for row in file.of("moments"):
            e = row.extents
            shapes.setdefault((row.passes, row.type, e["B"], e["H"], e["N"], e["D"]), row.name)
    for (scope, scalar, b, h, n, d), name in shapes.items():
        cells = []
        for file in files:
            row = file.rows.get(name)
            cells.append(bars.at_least(row["eff"], MOMENTS_OVER_TRIAD, [row]) if row else MISSING)
        what = f"bytes/s of moments over the triad, {TYPE_NAMES[scalar]}, {scope}, B, H, N, D = {b}, {h}, {n}, {d}"
        lines.append(Line(what, f">= {MOMENTS_OVER_TRIAD:.1f}", cells))
    groups = {
        "features": "O(N D^2) part of diagnose",
        "rows": "256 sampled rows of diagnose",
        "calls": "diagnose with 256 sampled rows",
    }
    names = dict.fromkeys(row.name for file in files for group in groups for row in file.of(group))
    for name in names:
        cells, bar = [], ""
        for file in files:
            row = file.rows.get(name)
            if row is None:
                cells.append(MISSING)
                continue
            e = row.extents
            what = f"{groups[row.group]}, {row.variant}, {TYPE_NAMES[row.type]}, {row.mask}, "
            what += f"H, N, D = {e['H']}, {e['N']}, {e['D']}: {'time' if row.group == 'calls' else 'eff'}"
            if row.group == "calls":
                cells.append(bars.Cell(bars.short_time(row.seconds), "disturbed" if row.disturbed else "shown"))
            elif row.group == "features" and (row.variant, row.type, e["D"], e["N"]) == ("lln", "f32", 64, 65536):
                bar = f">= {FEATURES_EFF:.1f}"
                cells.append(bars.at_least(row["eff"], FEATURES_EFF, [row]))
            else:
                cells.append(bars.Cell(f"{row['eff']:.2f}", "disturbed" if row.disturbed else "shown"))
        lines.append(Line(what, bar, cells))
    return lines


def merged(files):
    """The rows of all programs that ran with so many threads as one file, which the first one describes."""
    found = {}
    for file in sorted(files, key=lambda file: file.threads):
        found.setdefault(file.threads, []).append(file)
    return [
        results.Results(
            same[0].path, same[0].context, {name: row for file in reversed(same) for name, row in file.rows.items()}
        )
        for same in found.values()
    ]


# ---- charts ----------------------------------------------------------------------------------------------------------


def moments_charts(m):
    return {
        "lln_softmax.svg": softmax_charts(m),
        "lln_variance.svg": lln_charts(m),
        "lln_lines.svg": lines_charts(m),
        "lln_matching.svg": matching_charts(m),
        "lln_histograms.svg": histogram_charts(m),
    }


def diagnose_charts(d):
    found = {"lln_temperature.svg": temperature_charts(d), "lln_split.svg": split_charts(d)}
    if "real" in d:
        found["lln_real.svg"] = real_charts(d)
    return found


def charts_of(study):
    """The charts of a study by the name of their file."""
    try:
        return moments_charts(study) if study.command == "moments" else diagnose_charts(study)
    except OTHER_EXTENTS as error:
        raise results.UnusableFile(
            f"{study.path}: other extents than expected ({error}); is it from another version?"
        ) from error


def caption_of(study):
    if study.command == "moments":
        return f"linattn moments --study, N = {study['rows']}, seed {study['seed']}"
    real = f" --real {study['real_file']}" if "real" in study else ""
    return f"linattn diagnose --study{real}, {study['draws']} draws, seed {study['seed']}"


# ---- documents -------------------------------------------------------------------------------------------------------


def paragraphs(parts):
    return "\n\n".join(part for part in parts if part)


def times_text(files, lines):
    notes = [
        f"- {bars.column_name(file)}: {complaint}" for file in files for complaint in results.probe_complaints(file)
    ]
    return paragraphs(
        [
            "\n".join(f"- {bars.configuration(file)}" for file in files),
            bars.bars_markdown(files, lines),
            f"{bars.summary(lines)}.",
            "The probes of these runs were not steady:\n\n" + "\n".join(notes) if notes else "",
        ]
    )


def tables(m, d):
    """The text of each mark of the studies."""
    return {
        "claims": claims_markdown(m, d),
        "softmax": softmax_markdown(m),
        "cross": cross_markdown(m),
        "variance": lln_markdown(m),
        "lines": lines_markdown(m),
        "matching": paragraphs(
            ["sigma_q = sigma_k = sigma:", matching_markdown(m, True), "sigma_k = 1:", matching_markdown(m, False)]
        ),
        "histograms": histograms_markdown(m),
        "temperature": paragraphs(
            [
                "Entropy in bits:",
                temperature_markdown(d, "entropy", 3),
                "Spectral gap:",
                temperature_markdown(d, "spectral_gap", 3),
            ]
        ),
        "split": split_markdown(d),
        "real": paragraphs([real_markdown(d), "Means over the heads:", real_means_markdown(d)]),
    }


def write_docs(root, m, d, files, lines):
    page = root / "docs/lln.md"
    for mark, text in {**tables(m, d), "times": times_text(files, lines)}.items():
        bars.put(page, f"lln {mark}", text)
    (root / "docs/plots").mkdir(exist_ok=True)
    for study in (m, d):
        for name, drawn in charts_of(study).items():
            text = figure(drawn, caption=caption_of(study))
            (root / "docs/plots" / name).write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Prints the tables of LLN attention.")
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/lln.md and the charts into docs/plots"
    )
    parser.add_argument("--root", type=pathlib.Path, default=bars.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        loaded = [load(path) for path in options.files]
        studies = {file.command: file for file in loaded if isinstance(file, Study)}
        m, d = studies.get("moments"), studies.get("diagnose")
        files = merged([file for file in loaded if not isinstance(file, Study)])
        lines = bar_lines(files)
        printed = []
        if m and d and "real" in d:
            printed = list(tables(m, d).values())
        elif m:
            printed = [softmax_markdown(m), lln_markdown(m), lines_markdown(m), matching_markdown(m, True)]
        elif d:
            printed = [temperature_markdown(d, "entropy", 3), split_markdown(d)]
        if not printed and not bars.measured(lines):
            raise results.UnusableFile("no file is a study of LLN attention or has rows of its times")
        if options.write_docs:
            if not (m and d and "real" in d and bars.measured(lines)):
                raise results.UnusableFile("--write-docs needs both studies, with --real, and the times")
            write_docs(options.root, m, d, files, lines)
    except results.UnusableFile as error:
        print(f"lln: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"lln: a row has no counter {error}; is the file from another version?", file=sys.stderr)
        return 2
    except OTHER_EXTENTS as error:
        print(f"lln: a study has other extents than expected ({error}); is it from another version?", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"lln: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    for file in files:
        print(bars.configuration(file))
        for complaint in results.probe_complaints(file):
            print(f"note: {complaint}")
    for table in printed:
        print(f"\n{table}")
    if bars.measured(lines):
        print(f"\n{bars.text_table(files, lines)}")
        print(f"\n{bars.summary(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
