#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The tables and charts of the comparison of all methods: time, memory, errors, distance to exact attention.

    perf/comparison.py STUDY.json [--write-docs]

The file is that of `linattn study`. --write-docs puts the tables into docs/comparison.md, between their marks, and the
charts into docs/plots; it needs a study of all lists, with --real and without --quick.

The exit status is 2 if the file cannot be used.
"""

import argparse
import json
import math
import pathlib
import sys
from dataclasses import dataclass

import bars
import lln
import results
from bars import markdown_table
from lln import fixed, flat, mean, short
from svg import Axis, Chart, figure

PASSES = ("forward", "backward", "both")
FORWARD, BACKWARD, BOTH = range(3)
MEASURED = 1
STATUS = {2: "OOM", 3: "time", 4: "-"}  # of cells without a number
ERROR_OF = {1: "", 2: " (one head)", 3: " (256 rows)"}
EXACT = "softmax"
LRA_TASKS = ("Text", "ListOps", "Retrieval", "Pathfinder", "Image")
BUDGET_N, LONGER = 16384, 4  # tokens of LLN attention, and how many times more than exact attention in the same time

# LRA, Nahshan et al. 2024, A.8.3: seconds of training, MB; Table 2: (GB, seconds of a step) by length.
PAPER_LRA = {
    "softmax": ((21468, 5905, 21866, 6754, 13228), (17108, 4458, 8934, 4817, 9632)),
    "lln-diag": ((3043, 1774, 3135, 3042, 4053), (1641, 821, 1586, 1639, 3276)),
    "performer": ((3456, 1966, 3761, 3553, 13169), (2176, 1122, 2178, 2180, 4353)),
    "reformer": ((4610, 2439, 4714, 4694, 8737), (3261, 1631, 3008, 3258, 6514)),
    "skyformer": ((4523, 2970, 5602, 5240, 9347), (3068, 1697, 2974, 4041, 8079)),
}
PAPER_TABLE2 = {
    "softmax": {4096: (32.1, 6.8), 8192: "OOM", 16384: "OOM"},
    "nystrom": {16384: (19.1, 16.7)},
    "lln": {4096: (7.5, 3.2), 8192: (12.0, 6.1), 16384: (20.1, 11.8)},
    "lln-diag": {4096: (8.1, 3.6)},
}
INSTRUMENTS = {
    "output_error": "error of the output",
    "entropy": "row entropy, bits",
    "spectral_gap": "spectral gap",
    "logvar": "Var(ln P)",
}


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison(lln.Study):
    """A file of linattn study."""

    @property
    def lists(self):
        return [name for name in self["lists"].split(", ") if name]

    @property
    def methods(self):
        return self["methods"].split(", ")

    @property
    def curves(self):
        return [name for name in self["quality/curves"].split(", ") if f"quality/gaussian/{name}" in self]

    def lengths(self, which):
        return [int(n) for n in self[f"{which}/n"]]

    def value(self, which, method, name, row, passes=BOTH):
        """None where it was not measured."""
        if self[f"{which}/{method}/status"][row][passes] != MEASURED:
            return None
        return self[f"{which}/{method}/{name}"][row][passes]

    def times(self, which, method, passes=BOTH):
        """(N, seconds) of the rows that were measured, in the order of N."""
        rows = [(n, self.value(which, method, "seconds", i, passes)) for i, n in enumerate(self.lengths(which))]
        return sorted((n, seconds) for n, seconds in rows if seconds)

    def cell(self, which, method, row, text, passes=BOTH):
        """text() of a measured row, else why there is none."""
        status = self[f"{which}/{method}/status"][row][passes]
        return text() if status == MEASURED else STATUS.get(status, "open")


def load(path):
    """A Comparison, or what perf/lln.py loads. Raises UnusableFile."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        data = None
    if isinstance(data, dict) and data.get("command") == "study" and isinstance(data.get("study"), dict):
        return Comparison(str(path), "study", data["study"])
    return lln.load(path)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def between(points, n):
    """Seconds at n tokens, on straight lines through logarithms; None outside of what was measured."""
    for (n0, t0), (n1, t1) in zip(points, points[1:]):
        if n0 <= n <= n1:
            share = math.log(n / n0) / math.log(n1 / n0)
            return math.exp(math.log(t0) + share * (math.log(t1) - math.log(t0)))
    return dict(points).get(n)


def crossing(exact, other):
    """(text, N) of the length from which on `other` takes less time than `exact`; N is None if none is known."""
    known = dict(exact)
    both = [(n, math.log(t / known[n])) for n, t in other if n in known]
    if not both:
        return "-", None
    first = len(both)
    while first > 0 and both[first - 1][1] < 0:
        first -= 1
    if first == len(both):
        return f"> {both[-1][0]}", None
    if first == 0:
        return f"<= {both[0][0]}", both[0][0]
    (n0, r0), (n1, r1) = both[first - 1], both[first]
    n = n0 * (n1 / n0) ** (r0 / (r0 - r1))
    return f"{n:.0f}", n


def longest(points, seconds):
    """(tokens that take so long, whether they lie inside of what was measured), by the lines of between()."""
    if len(points) < 2:
        return math.nan, False
    pairs = list(zip(points, points[1:]))
    inside = points[0][1] <= seconds <= points[-1][1]
    (n0, t0), (n1, t1) = next(((a, b) for a, b in pairs if seconds <= b[1]), pairs[-1])
    slope = math.log(n1 / n0) / math.log(t1 / t0)
    return n0 * (seconds / t0) ** slope, inside


def ratio(study, which, row, method, name, passes=BOTH):
    """That of exact attention over that of the method."""
    exact, other = (study.value(which, m, name, row, passes) for m in (EXACT, method))
    return exact / other if exact and other else None


def times_as_much(value):
    return "-" if value is None else f"{value:.3g}"


def short_time(seconds):
    return f"{seconds:.3g} s" if seconds >= 1 else bars.short_time(seconds)


def mebibytes(value):
    return f"{value / 2**20:.3g}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def lengths_markdown(study, which, name, text, passes=BOTH):
    """One line for each method, one column for each length."""
    lengths = study.lengths(which)
    lines = []
    for method in study.methods:
        cells = [
            study.cell(which, method, i, lambda: text(study.value(which, method, name, i, passes)), passes)
            for i in range(len(lengths))
        ]
        lines.append([method, *cells])
    return markdown_table(["", *(str(n) for n in lengths)], lines)


def time_markdown(study, which, passes=BOTH):
    return lengths_markdown(study, which, "seconds", short_time, passes)


def memory_markdown(study, which, passes=BOTH):
    return lengths_markdown(study, which, "peak_bytes", mebibytes, passes)


def ratios_markdown(study, which, name):
    lengths = study.lengths(which)
    lines = [
        [method, *(times_as_much(ratio(study, which, i, method, name)) for i in range(len(lengths)))]
        for method in study.methods
        if method != EXACT
    ]
    return markdown_table(["", *(str(n) for n in lengths)], lines)


def list_text(study, which):
    """Time, memory and ratios of one list against N."""
    parts = [
        f"{study[f'{which}/about']}. Forward and backward, time:",
        time_markdown(study, which),
        "Forward alone, time:",
        time_markdown(study, which, FORWARD),
        "Peak beyond the inputs, forward and backward, MiB:",
        memory_markdown(study, which),
    ]
    if EXACT in study.methods:
        parts += ["Time of exact attention over that of the method:", ratios_markdown(study, which, "seconds")]
    return lln.paragraphs(parts)


def paper_lra(method, kind):
    own, exact = PAPER_LRA[method][kind], PAPER_LRA["softmax"][kind]
    return [e / o for e, o in zip(exact, own)]


def lra_markdown(study):
    """Ratios of exact attention over the method, beside those of the paper."""
    lines = []
    for method in [*(m for m in study.methods if m != EXACT), "reformer", "skyformer"]:
        for kind, (what, name) in enumerate((("time", "seconds"), ("memory", "peak_bytes"))):
            cells = ["open"] * len(LRA_TASKS)
            if method in study.methods:
                cells = [times_as_much(ratio(study, "lra", i, method, name)) for i in range(len(LRA_TASKS))]
            of_paper = ["-"] * len(LRA_TASKS)
            if method in PAPER_LRA:
                of_paper = [f"{value:.1f}" for value in paper_lra(method, kind)]
            lines.append([method, what, *(f"{ours} ({theirs})" for ours, theirs in zip(cells, of_paper))])
    return markdown_table(["", "exact over it", *LRA_TASKS], lines)


def crossover_markdown(study):
    lines = []
    lists = [which for which in ("table2", "affine") if which in study.lists]
    for method in study.methods:
        if method == EXACT:
            continue
        cells = [
            crossing(study.times(which, EXACT, passes), study.times(which, method, passes))[0]
            for which in lists
            for passes in (FORWARD, BOTH)
        ]
        lines.append([method, *cells])
    names = {"table2": "full, D = 64", "affine": "causal, D = 128"}
    return markdown_table(["", *(f"{names[which]}, {PASSES[p]}" for which in lists for p in (FORWARD, BOTH))], lines)


def errors_markdown(study):
    """The largest error of each method over the rows of each list."""
    lines = []
    for method in study.methods:
        cells = []
        for which in study.lists:
            for passes in (FORWARD, BACKWARD):
                found = [
                    (study.value(which, method, "error", i, passes), study[f"{which}/{method}/error_of"][i][passes])
                    for i in range(len(study.lengths(which)))
                ]
                found = [(error, of) for error, of in found if error is not None]
                worst = max(found, default=None)
                cells.append(f"{worst[0]:.1e}{ERROR_OF.get(worst[1], '')}" if worst else "-")
        lines.append([method, *cells])
    return markdown_table(["", *(f"{which}, {p}" for which in study.lists for p in PASSES[:2])], lines)


def claims_markdown(study):
    """What the papers say, and what was measured."""
    lines = []

    def seconds(method, n, passes=BOTH):
        return dict(study.times("table2", method, passes)).get(n) if method in study.methods else None

    own = seconds("lln", BUDGET_N)
    if own and EXACT in study.methods:
        for passes in (FORWARD, BOTH):
            budget = seconds("lln", BUDGET_N, passes)
            n, inside = longest(study.times("table2", EXACT, passes), budget)
            factor = BUDGET_N / n
            lines.append(
                [
                    f"LLN attention goes at least {LONGER} times as far as exact attention in the same time, "
                    f"at N = {BUDGET_N} ({PASSES[passes]})",
                    f"{'holds' if factor >= LONGER else 'does not hold'}: {factor:.1f} times; exact attention does "
                    f"{n:.0f} tokens in {short_time(budget)}{'' if inside else ' (extrapolated)'}",
                ]
            )
    for n in (8192, 16384):
        now, half = seconds("lln", n), seconds("lln", n // 2)
        if now and half:
            theirs = PAPER_TABLE2["lln"]
            claim = (
                f"{theirs[n][1] / theirs[n // 2][1]:.2f} for the step, {theirs[n][0] / theirs[n // 2][0]:.2f} for memory"
            )
            row = study.lengths("table2").index(n)
            memory = study.value("table2", "lln", "peak_bytes", row) / study.value("table2", "lln", "peak_bytes", row - 1)
            lines.append(
                [f"LLN from N = {n // 2} to {n}: {claim} (whole model)", f"{now / half:.2f}, {memory:.2f} (attention)"]
            )
    exact, own, diag = (seconds(method, 4096) for method in (EXACT, "lln", "lln-diag"))
    if exact and own:
        lines.append(["exact attention over LLN at N = 4096: time 2.1 (whole model)", f"{exact / own:.1f} (attention)"])
    if own and diag:
        lines.append(["the block part adds 13 % of time to LLN at N = 4096 (whole model)", f"{100 * (diag / own - 1):+.0f} % (attention)"])
    if "lra" in study.lists and "lln-diag" in study.methods and EXACT in study.methods:
        for kind, name, what in ((0, "seconds", "time"), (1, "peak_bytes", "memory")):
            ours = [ratio(study, "lra", i, "lln-diag", name) for i in range(len(LRA_TASKS))]
            lines.append(
                [
                    f"LRA, exact attention over LLN+Diag, {what}: "
                    + ", ".join(f"{value:.1f}" for value in paper_lra("lln-diag", kind)),
                    ", ".join(times_as_much(value) for value in ours),
                ]
            )
    return markdown_table(["the paper", "measured"], lines)


def quality_markdown(study, instrument):
    """Means over the draws against sigma_sm."""
    sigmas = study["quality/gaussian/sigma_sm"]
    lines = []
    for name in study.curves:
        rows = study[f"quality/gaussian/{name}/{instrument}"]
        lines.append([name, *(fixed(mean(row)) if instrument != "output_error" else short(mean(row)) for row in rows)])
    return markdown_table(["sigma_sm", *(f"{sigma:g}" for sigma in sigmas)], lines)


def real_markdown(study):
    """Means over the heads."""
    lines = []
    for name in study.curves:
        if f"quality/real/{name}" not in study:
            continue
        lines.append([name, *(short(mean(flat(study[f"quality/real/{name}/{i}"]))) for i in INSTRUMENTS)])
    return markdown_table(["", *INSTRUMENTS.values()], lines)


def absent_text(study):
    """Why some have no number."""
    reasons = {}
    for name in study.curves:
        if f"quality/gaussian/{name}/absent" in study:
            reasons.setdefault(study[f"quality/gaussian/{name}/absent"], []).append(name)
    return "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())


def setup_text(study):
    parts = [
        study["cpu"] or "a processor without a name",
        f"Kokkos {study['kokkos']}",
        f"{study['space']}, {study['threads']:g} threads",
        study["dtype"],
        study["date"],
    ]
    return (
        f"{', '.join(parts)}; at most {study['memory-limit'] / 2**30:.1f} GiB and {study['time-cap']:g} s for one run "
        f"forward and backward; seed {study['seed']:g}."
    )


def tables(study):
    """The text of each mark."""
    found = {"setup": setup_text(study)}
    if "table2" in study.lists:
        found["claims"] = claims_markdown(study)
    for which in study.lists:
        if which != "lra":
            found[which] = list_text(study, which)
    if "lra" in study.lists and EXACT in study.methods:
        found["lra"] = lln.paragraphs(
            [
                f"{study['lra/about']}. Forward and backward, time:",
                task_markdown(study),
                "Exact attention over the method, in brackets the paper's:",
                lra_markdown(study),
            ]
        )
    if EXACT in study.methods and {"table2", "affine"} & set(study.lists):
        found["crossover"] = crossover_markdown(study)
    found["errors"] = errors_markdown(study)
    found["quality"] = lln.paragraphs(
        [part for name, title in INSTRUMENTS.items() for part in (f"{title}:", quality_markdown(study, name))]
        + [absent_text(study)]
    )
    if "quality/real" in study:
        found["real"] = real_markdown(study)
    return found


def task_markdown(study):
    lines = [
        [
            method,
            *(
                study.cell("lra", method, i, lambda: short_time(study.value("lra", method, "seconds", i)))
                for i in range(len(LRA_TASKS))
            ),
        ]
        for method in study.methods
    ]
    return markdown_table(["", *LRA_TASKS], lines)


# ---- charts ----------------------------------------------------------------------------------------------------------


def against_length(study, which, name, title, label, passes, scale=1.0):
    chart = Chart(title, Axis("N", log=2 if which == "table2" else 10), Axis(label, log=10))
    for style, method in enumerate(study.methods):
        points = [
            (n, study.value(which, method, name, i, passes)) for i, n in enumerate(study.lengths(which))
        ]
        points = sorted((n, value * scale) for n, value in points if value)
        chart.line(method, *lln.apart(points), style=style, dashed=style >= 8)
    return chart


def length_charts(study, name, label, scale=1.0):
    titles = {"table2": "full, H = 12, D = 64", "affine": "causal, H = 2, D = 128"}
    return [
        against_length(study, which, name, f"{PASSES[p].capitalize()}, {titles[which]}", label, p, scale)
        for which in ("table2", "affine")
        if which in study.lists
        for p in (FORWARD, BOTH)
    ]


def ratio_charts(study):
    found = []
    for kind, (what, name) in enumerate((("Time", "seconds"), ("Memory", "peak_bytes"))):
        chart = Chart(
            f"{what} of exact attention over the method, LRA",
            Axis("", categories=list(LRA_TASKS)),
            Axis("ratio", log=10),
        )
        for style, method in enumerate(m for m in study.methods if m in PAPER_LRA or m == "lln"):
            if method == EXACT:
                continue
            ours = [(task, ratio(study, "lra", i, method, name)) for i, task in enumerate(LRA_TASKS)]
            chart.line(f"{method}, measured", *lln.apart([p for p in ours if p[1]]), style=2 * style)
            if method in PAPER_LRA:
                chart.line(f"{method}, the paper", list(LRA_TASKS), paper_lra(method, kind), style=2 * style + 1)
        chart.level(1, "")
        found.append(chart)
    return found


def quality_charts(study):
    sigmas = study["quality/gaussian/sigma_sm"]
    found = []
    for instrument, title in INSTRUMENTS.items():
        log = 10 if instrument in ("output_error", "logvar") else 0
        chart = Chart(f"{title}, Gaussian q and k", Axis("sigma_sm"), Axis(title, log=log))
        for style, name in enumerate(study.curves):
            values = [mean(row) for row in study[f"quality/gaussian/{name}/{instrument}"]]
            if instrument == "output_error":
                values = [value if value > 1e-9 else math.nan for value in values]  # of exact attention itself
            points = [(x, y) for x, y in zip(sigmas, values) if math.isfinite(y)]
            chart.line(name, *lln.apart(points), style=style, dashed=style >= 8)
        found.append(chart)
    return found


def charts_of(study):
    """The charts of a study by the name of their file."""
    try:
        found = {}
        if {"table2", "affine"} & set(study.lists):
            found["comparison_time.svg"] = length_charts(study, "seconds", "time, s")
            found["comparison_memory.svg"] = length_charts(study, "peak_bytes", "peak beyond the inputs, MiB", 2.0**-20)
        if "lra" in study.lists and EXACT in study.methods:
            found["comparison_ratios.svg"] = ratio_charts(study)
        found["comparison_quality.svg"] = quality_charts(study)
        return {name: [c for c in charts if c.series] for name, charts in found.items() if any(c.series for c in charts)}
    except lln.OTHER_EXTENTS as error:
        raise results.UnusableFile(
            f"{study.path}: other extents than expected ({error}); is it from another version?"
        ) from error


def caption_of(study):
    real = f" --real {study['real']}" if study["real"] else ""
    quick = " --quick" if study["quick"] else ""
    return f"linattn study{quick}{real}; {study['cpu']}, {study['threads']:g} threads, {study['dtype']}, {study['date']}"


# ---- documents -------------------------------------------------------------------------------------------------------


def write_docs(root, study):
    page = root / "docs/comparison.md"
    for mark, text in tables(study).items():
        bars.put(page, f"comparison {mark}", text)
    (root / "docs/plots").mkdir(exist_ok=True)
    for name, drawn in charts_of(study).items():
        text = figure(drawn, caption=caption_of(study))
        (root / "docs/plots" / name).write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Prints the tables of the comparison of all methods.")
    parser.add_argument("file", metavar="STUDY.json")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/comparison.md and the charts into docs/plots"
    )
    parser.add_argument("--root", type=pathlib.Path, default=bars.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        study = load(options.file)
        if not isinstance(study, Comparison):
            raise results.UnusableFile(f"{options.file}: not a file of linattn study")
        printed = tables(study)
        if options.write_docs:
            if set(study.lists) != {"table2", "lra", "affine"} or "real" not in printed or study["quick"]:
                raise results.UnusableFile("--write-docs needs a study of all lists, with --real and without --quick")
            if EXACT not in study.methods or "lln" not in study.methods:
                raise results.UnusableFile(f"--write-docs needs a study of all methods, found {', '.join(study.methods)}")
            write_docs(options.root, study)
    except results.UnusableFile as error:
        print(f"comparison: {error}", file=sys.stderr)
        return 2
    except lln.OTHER_EXTENTS as error:
        print(
            f"comparison: {options.file}: other extents than expected ({error}); is it from another version?",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"comparison: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    for mark, text in printed.items():
        print(f"{mark}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
