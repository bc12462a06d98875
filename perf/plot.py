#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Draws results as an SVG file.

    perf/plot.py FILE.json ... -o OUT.svg

Charts that the rows of the files allow: eff by variant (group main), eff and time of a FLOP against D (d_sweep), time
of a token and memory against N (n_sweep, ten_n), decoding (step). Rows that were disturbed are left out. Of a study of
`linattn moments` or `linattn diagnose` all its charts (see perf/lln.py), and of `linattn study` (see
perf/comparison.py).
"""

import argparse
import sys

import results
from svg import Axis, Chart, figure

PASSES = ("forward", "backward")


def steady(file, group, **parts):
    return [row for row in file.of(group, **parts) if not row.disturbed]


def tag(file, files):
    """What tells this file from the others, for labels."""

    def value(f, key):
        return f.context.get(key, "LinAttn" if key == "library" else "")

    words = []
    if len({value(f, "library") for f in files}) > 1:
        words.append(value(file, "library"))
    elif len({value(f, "execution_space") for f in files}) > 1:
        words.append(value(file, "execution_space"))
    if len({value(f, "threads") for f in files}) > 1:
        words.append("1 thread" if file.threads == 1 else f"{file.threads} threads")
    return ", ".join(words)


def series(files, group, key):
    """Rows by label: those of a pass, variant and type, sorted by key(row)."""
    found = {}
    files = [file for file in files if file.of(group)]
    for file in files:
        variants = {(row.variant, row.type, row.mask) for f in files for row in f.of(group)}
        for row in steady(file, group):
            words = [row.passes]
            for position, value in enumerate((row.variant, row.type, row.mask)):
                if len({v[position] for v in variants}) > 1:
                    words.append(value)
            if group == "step":
                words[0] = "1 sequence" if row.extents["B"] == 1 else f"{row.extents['B']} sequences"
            found.setdefault(", ".join(filter(None, [*words, tag(file, files)])), []).append(row)
    return {label: sorted(rows, key=key) for label, rows in found.items()}


def against(files, group, extent, title, x, y, value):
    """A chart of value(row) against an extent."""
    chart = Chart(title, x, y)
    for label, rows in series(files, group, lambda row: row.extents[extent]).items():
        usable = [row for row in rows if value(row) is not None]
        chart.line(
            label, [row.extents[extent] for row in usable], [value(row) for row in usable], dashed="backward" in label
        )
    return chart


def memory(row):
    c = row.counters
    if "peak_bytes" in c:
        return c["peak_bytes"]
    return c["workspace_bytes"] + c["saved_bytes"] if "workspace_bytes" in c else None


def efficiency(files):
    rows = [row for file in files for row in file.of("main", type="f32") if "eff" in row.counters]
    files = [file for file in files if any("eff" in row.counters for row in file.of("main"))]
    name = lambda row: row.variant.replace("_", " ")
    chart = Chart(
        "eff in fp32, causal",
        Axis("", categories=list(dict.fromkeys(map(name, rows)))),
        Axis("eff = least time / time", low=0, high=max([1.0] + [row["eff"] for row in rows])),
    )
    for file in files:
        for passes in PASSES:
            for d in sorted({row.extents["D"] for row in rows}):
                chosen = [
                    row
                    for row in steady(file, "main", type="f32", passes=passes)
                    if "eff" in row.counters and row.extents["D"] == d
                ]
                chart.line(
                    ", ".join(filter(None, [f"{passes}, D = {d}", tag(file, files)])),
                    [name(row) for row in chosen],
                    [row["eff"] for row in chosen],
                )
    chart.level(0.6, "bar forward, free features")
    chart.level(0.5, "bar backward; forward with elu")
    return chart


def charts(files):
    """All charts that have data."""
    nanoseconds = lambda row: row.seconds / row.tokens * 1e9
    eff = lambda row: row.counters.get("eff")
    found = [
        efficiency(files),
        against(files, "d_sweep", "D", "eff against D = Dv", Axis("D = Dv"), Axis("eff", low=0, high=1), eff),
        against(
            files,
            "d_sweep",
            "D",
            "Time of a FLOP against D = Dv",
            Axis("D = Dv"),
            Axis("time, ps", log=10),
            lambda row: 1e3 / row["GFLOP/s"],
        ),
        against(
            files,
            "n_sweep",
            "N",
            "Time of a token against N",
            Axis("N", log=2),
            Axis("time of a token, ns", log=10),
            nanoseconds,
        ),
        against(
            files, "n_sweep", "N", "Memory beside inputs and outputs", Axis("N", log=2), Axis("bytes", log=10), memory
        ),
        against(
            files,
            "ten_n",
            "N",
            "Time of a token, D = 128",
            Axis("N", log=10),
            Axis("time of a token, ns", log=10),
            nanoseconds,
        ),
        against(
            files,
            "step",
            "D",
            "Decoding: time of a step",
            Axis("D = Dv", log=2),
            Axis("time, us", log=10),
            lambda row: row.seconds * 1e6,
        ),
    ]
    return [chart for chart in found if chart.series]


def caption(files):
    c = files[0].context
    parts = [
        c.get("cpu"),
        c.get("device"),
        c.get("compiler"),
        f"Kokkos {c['kokkos_version']}" if "kokkos_version" in c else None,
        str(c.get("date", ""))[:10],
    ]
    return ", ".join(filter(None, parts))


def main(arguments=None):
    import comparison  # which draw with what is here
    import lln

    parser = argparse.ArgumentParser(description="Draws results as an SVG file.")
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.svg")
    options = parser.parse_args(arguments)
    try:
        loaded = [comparison.load(path) for path in options.files]
        files = [file for file in loaded if not isinstance(file, lln.Study)]
        studies = [file for file in loaded if isinstance(file, lln.Study)]
        of = lambda study: comparison if isinstance(study, comparison.Comparison) else lln
        drawn = charts(files) + [c for study in studies for found in of(study).charts_of(study).values() for c in found]
        if not drawn:
            raise results.UnusableFile("no rows that any chart shows")
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(figure(drawn, caption=caption(files) if files else of(studies[0]).caption_of(studies[0])))
    except results.UnusableFile as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plot: {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(drawn)} charts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
