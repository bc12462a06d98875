#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The table of bars: what was aimed at, and what was measured.

    perf/bars.py FILE.json ... [--write-docs] [--markdown]

The files are those of one or several runs of perf/attention (one for each number of threads), perf/step and
`gpu_check bench`. --write-docs puts the tables into docs/performance.md and README.md, between their marks.

A missed bar is no error: the last line counts them, and the exit status is 0. It is 2 if a file cannot be used.
"""

import argparse
import pathlib
import re
import sys
from dataclasses import dataclass

import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
FREE = ("normalised_identity", "relu")  # features that cost nothing
PASSES = ("forward", "backward")
TYPE_NAMES = {"f32": "fp32", "f64": "fp64", "f16": "fp16", "bf16": "bf16"}

# Bars.
EFF = {"free": {"forward": 0.60, "backward": 0.50}, "elu": {"forward": 0.50, "backward": 0.45}}
FEW_HEADS = 0.8  # throughput of one head over that of many
LLN_OVER_ELU = 1.25  # time
LLN_DIAG_OVER_LLN = {"causal": 1.7, "full": 2.3}  # time, D = 64
EXACT_EFF = {"forward": 0.50, "backward": 0.40}
CROSSOVER = 1.0  # time of exact attention over that of a linear one, causal, N = 2 D + 64
JUMP = 2.0  # time of a FLOP between neighbours
GPU_EFF = {"forward": 0.35, "backward": 0.25}


@dataclass(frozen=True)
class Cell:
    text: str
    verdict: str  # ok, below, disturbed, missing; shown: there is no bar

    def __str__(self):
        return {
            "ok": f"{self.text} ok",
            "shown": self.text,
            "below": f"{self.text} below",
            "disturbed": f"({self.text}) disturbed",
            "missing": "-",
        }[self.verdict]

    @property
    def markdown(self):
        return {
            "ok": self.text,
            "shown": self.text,
            "below": f"{self.text} (below)",
            "disturbed": f"{self.text} (disturbed)",
            "missing": "-",
        }[self.verdict]


MISSING = Cell("", "missing")


@dataclass(frozen=True)
class Line:
    what: str
    bar: str
    cells: list  # one for each file


def at_least(value, bar, rows, text="{:.2f}"):
    return _cell(value >= bar, text.format(value), rows)


def at_most(value, bar, rows, text="{:.2f}"):
    return _cell(value <= bar, text.format(value), rows)


def _cell(holds, text, rows):
    return Cell(text, "disturbed" if any(row.disturbed for row in rows) else "ok" if holds else "below")


def one(rows):
    return rows[0] if rows else None


def eff_lines(files):
    lines = []
    for kind, variants in (("free", FREE), ("elu", ("elu",))):
        for variant in variants:
            for scalar in ("f32", "f64"):
                for d in (64, 128):
                    for passes in PASSES:
                        bar = EFF[kind][passes]
                        cells = []
                        for file in files:
                            row = one(
                                [
                                    r
                                    for r in file.of("main", passes=passes, variant=variant, type=scalar)
                                    if r.extents["D"] == d
                                ]
                            )
                            cells.append(at_least(row["eff"], bar, [row]) if row else MISSING)
                        name = variant.replace("_", " ")
                        lines.append(
                            Line(f"eff, {name}, {TYPE_NAMES[scalar]}, D = Dv = {d}, {passes}", f">= {bar:.2f}", cells)
                        )
    return lines


def lln_lines(files):
    lines = []
    for scalar in ("f32", "f64"):
        for d in (64, 128):
            for passes in PASSES:
                cells = []
                for file in files:
                    row = one([r for r in file.of("lln_over_elu", passes=passes, type=scalar) if r.extents["D"] == d])
                    cells.append(at_most(row["ratio"], LLN_OVER_ELU, [row]) if row else MISSING)
                lines.append(
                    Line(
                        f"time of lln over elu, {TYPE_NAMES[scalar]}, D = Dv = {d}, {passes}",
                        f"<= {LLN_OVER_ELU:.2f}",
                        cells,
                    )
                )
    for scalar in ("f32", "f64"):
        for mask, bar in LLN_DIAG_OVER_LLN.items():
            for passes in PASSES:
                cells = []
                for file in files:
                    rows = file.of("lln_diag_over_lln", passes=passes, type=scalar)
                    row = one([r for r in rows if r.mask == mask])
                    cells.append(at_most(row["ratio"], bar, [row]) if row else MISSING)
                what = f"time of lln-diag over lln, {TYPE_NAMES[scalar]}, D = Dv = 64, {mask}, {passes}"
                lines.append(Line(what, f"<= {bar:.1f}", cells))
    return lines


def few_heads_lines(files):
    lines = []
    for variant in ("relu", "elu"):
        for passes in PASSES:
            cells = []
            for file in files:
                row = one(file.of("few_heads", passes=passes, variant=variant))
                idle = file.threads == 1  # one head is enough for one thread
                cells.append(at_least(1 / row["ratio"], FEW_HEADS, [row]) if row and not idle else MISSING)
            lines.append(
                Line(
                    f"throughput of B H = 1, N = 65,536 over that of many heads, {variant}, {passes}",
                    f">= {FEW_HEADS:.1f}",
                    cells,
                )
            )
    return lines


def jump(rows):
    """Largest ratio of the time of a FLOP between neighbours in D, and the two rows."""
    rows = sorted(rows, key=lambda row: row.extents["D"])

    def cost(row):
        return 1 / row["GFLOP/s"]

    pairs = list(zip(rows, rows[1:]))
    worst = max(pairs, key=lambda p: max(cost(p[1]) / cost(p[0]), cost(p[0]) / cost(p[1])))
    ratio = cost(worst[1]) / cost(worst[0])
    return max(ratio, 1 / ratio), worst


def cliff_lines(files):
    lines = []
    for passes in PASSES:
        cells = []
        for file in files:
            rows = file.of("d_sweep", passes=passes)
            if len(rows) < 2:
                cells.append(MISSING)
                continue
            ratio, pair = jump(rows)
            low, high = (row.extents["D"] for row in pair)
            cells.append(at_most(ratio, JUMP, pair, f"{{:.2f}} ({low} to {high})"))
        lines.append(
            Line(f"time of a FLOP, largest jump between D = 16, 32, ..., 512, {passes}", f"<= {JUMP:.0f}", cells)
        )
    for passes in PASSES:
        cells = []
        for file in files:
            rows = file.of("next_n", passes=passes)
            if not rows:
                cells.append(MISSING)
                continue
            worst = max(rows, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
            cells.append(
                at_most(max(worst["ratio"], 1 / worst["ratio"]), JUMP, [worst], f"{{:.2f}} (N = {worst.extents['N']})")
            )
        lines.append(Line(f"time of a FLOP, largest jump between N and N + 1, {passes}", f"<= {JUMP:.0f}", cells))
    return lines


def linear_lines(files):
    lines = []
    for passes in PASSES:
        rows = [one(file.of("linear_in_n", passes=passes)) for file in files]
        lines.append(
            Line(
                f"time of a token, N = 65,536 over N = 4,096, elu, {passes}",
                "",
                [
                    Cell(f"{row['ratio']:.2f}", "disturbed" if row.disturbed else "shown") if row else MISSING
                    for row in rows
                ],
            )
        )
    return lines


def short_lines(files):
    """Against exact softmax attention, where there are rows of it."""
    lines = []
    for passes in PASSES:
        cells = []
        for file in files:
            pairs = []
            for row in file.of("short", passes=passes, variant="elu"):
                exact = one(
                    [
                        r
                        for r in file.of("short", passes=passes, variant="softmax", type=row.type)
                        if r.extents == row.extents
                    ]
                )
                if exact:
                    pairs.append((row, exact))
            if not pairs:
                cells.append(MISSING)
                continue
            worst = max(pairs, key=lambda pair: pair[0].seconds / pair[1].seconds)
            cells.append(
                at_most(worst[0].seconds / worst[1].seconds, 1, worst, f"{{:.2f}} (N = {worst[0].extents['N']})")
            )
        lines.append(Line(f"time over exact softmax attention, N <= 256, elu, {passes}", "<= 1", cells))
    return lines


def exact_lines(files):
    """Exact attention against the FMA rate, and where linear attention overtakes it."""
    lines = []
    for mask in ("full", "causal"):
        for heads, n, d in ((None, 2048, 64), (None, 2048, 128), (1, 4096, 64)):
            for passes in PASSES:
                cells = []
                for file in files:
                    rows = file.of("exact", passes=passes, type="f32")
                    row = one(
                        [
                            r
                            for r in rows
                            if r.mask == mask
                            and (r.extents["N"], r.extents["D"]) == (n, d)
                            and (r.extents["H"] == 1) == (heads == 1)
                        ]
                    )
                    cells.append(at_least(row["eff"], EXACT_EFF[passes], [row]) if row else MISSING)
                what = f"eff, exact attention, fp32, {'B H = 1, ' if heads == 1 else ''}N = {n:,}, D = Dv = {d}, {mask}, {passes}"
                lines.append(Line(what, f">= {EXACT_EFF[passes]:.2f}", cells))
    for variant in ("elu", "lln"):
        for d in (64, 128):
            cells = []
            for file in files:
                row = one([r for r in file.of("crossover", variant=variant) if r.extents["D"] == d])
                cells.append(at_least(row["ratio"], CROSSOVER, [row]) if row else MISSING)
            what = f"time of exact attention over {variant}, causal, N = 2 D + 64 = {2 * d + 64}, forward"
            lines.append(Line(what, f">= {CROSSOVER:.0f}", cells))
    return lines


def memory_lines(files):
    """Kept bytes by definition; temporaries by the size query against the formula, and as the process grew."""
    lines = []
    keys = dict.fromkeys((row.passes, row.variant, row.type) for file in files for row in file.of("memory"))
    noise_a_thread = 64 * 4096  # pages that Linux counts late
    for passes, variant, scalar in keys:
        kept, query, measured = [], [], []
        for file in files:
            row = one(file.of("memory", passes=passes, variant=variant, type=scalar))
            if row is None:
                kept.append(MISSING), query.append(MISSING), measured.append(MISSING)
                continue
            more, number = row["tokens_2N"] - row["tokens_N"], row["number_bytes"]
            kept.append(at_most((row["saved_2N"] - row["saved_N"]) / more / number, 1, [], "{:.2f}"))
            limit = row["tokens_2N"] * number + row["states_2N"]
            query.append(at_most(row["workspace_2N"] / limit, 1, [], "{:.2f}"))
            if row["measured_N"] < 0 or row["measured_2N"] < 0:
                measured.append(MISSING)
            else:
                slope = max(0.0, row["measured_2N"] - row["measured_N"])
                bar = 1 + noise_a_thread * (file.threads + 1) / (more * number)
                measured.append(_cell(slope / more / number <= bar, f"{slope / more / number:.2f}", []))
        what = f"{variant}, {TYPE_NAMES[scalar]}, {passes}"
        if passes == "forward":
            lines.append(Line(f"numbers kept for each row, {what}", "<= 1", kept))
        lines.append(Line(f"temporaries over (a number a row + states), {what}", "<= 1", query))
        lines.append(
            Line(f"growth of the process for each further row, in numbers, {what}", "<= 1 + resolution", measured)
        )
    return lines


def gpu_lines(files, gpu_files):
    """Bars of a device stand in columns of their own file; without one they are shown as not measured."""
    lines = []
    for passes in PASSES:
        for d in (64, 128):
            cells = []
            for file in gpu_files:
                row = one(
                    [r for r in file.of("main", passes=passes, variant="relu", type="f32") if r.extents["D"] == d]
                )
                cells.append(at_least(row["eff"], GPU_EFF[passes], [row]) if row else MISSING)
            lines.append(
                Line(
                    f"eff on a GPU, portable roof, relu, fp32, D = Dv = {d}, {passes}",
                    f">= {GPU_EFF[passes]:.2f}",
                    cells or [MISSING] * len(files),
                )
            )
    return lines


def host_lines(files):
    lines = (
        eff_lines(files)
        + lln_lines(files)
        + few_heads_lines(files)
        + cliff_lines(files)
        + linear_lines(files)
        + short_lines(files)
        + exact_lines(files)
        + memory_lines(files)
    )
    return [line for line in lines if line.cells]


def column_name(file):
    if file.context.get("device"):
        return file.context["device"]
    return f"{file.threads} threads" if file.threads != 1 else "1 thread"


def text_table(files, lines):
    heads = ["", "bar", *(column_name(file) for file in files)]
    rows = [[line.what, line.bar, *map(str, line.cells)] for line in measured(lines)]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]
    )


def markdown_table(heads, rows):
    return "\n".join(["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]])


def bars_markdown(files, lines):
    return markdown_table(
        ["what", "bar", *(column_name(file) for file in files)],
        [[line.what, line.bar, *(cell.markdown for cell in line.cells)] for line in measured(lines)],
    )


def short_number(value):
    """In millions, with two digits that mean something."""
    millions = value / 1e6
    return f"{millions:.0f} M" if millions >= 10 else f"{millions:.1f} M" if millions >= 1 else f"{millions:.2f} M"


def short_time(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def results_markdown(file, scalar="f32", variants=None):
    """Throughput and eff of the main rows of one file."""
    found = {}
    for row in file.of("main", type=scalar):
        if variants is None or row.variant in variants:
            e = row.extents
            found.setdefault((row.variant, f"{e['B']}, {e['H']}, {e['N']}, {e['D']}"), {})[row.passes] = row
    lines = []
    for (variant, extents), passes in found.items():
        cells = [variant.replace("_", " "), extents]
        for name in PASSES:
            row = passes.get(name)
            mark = " (disturbed)" if row is not None and row.disturbed else ""
            cells += (
                [
                    short_number(row["tokens/s"]),
                    f"{row['eff']:.2f}{mark}",
                    f"{row['GFLOP/s']:.0f}",
                    f"{row['GB/s']:.1f}",
                ]
                if row is not None
                else ["-"] * 4
            )
        lines.append(cells)
    heads = ["", "shape (B, H, N, D = Dv)"]
    for name in PASSES:
        heads += [f"{name}, tokens/s", "eff", "GFLOP/s", "GB/s"]
    return markdown_table(heads, lines)


def step_markdown(files):
    lines = []
    names = list(dict.fromkeys(row.name for file in files for row in file.of("step")))
    for name in names:
        cells = [name.removeprefix("step/step/")]
        for file in files:
            row = file.rows.get(name)
            cells.append(f"{short_time(row.seconds)}, {row['GB/s']:.1f} GB/s" if row else "-")
        lines.append(cells)
    return markdown_table(["one token for every head", *(column_name(file) for file in files)], lines) if lines else ""


def configuration(file):
    c = file.context
    probes = [row for row in (file.rows.get("probes/begin"), file.rows.get("probes/end")) if row]
    roofs = ""
    if probes:
        fma, double, triad = (
            max(row[key] for row in probes) for key in ("fma_f32_GFLOP/s", "fma_f64_GFLOP/s", "triad_GB/s")
        )
        roofs = f"; roofs {fma:.0f} GFLOP/s fp32, {double:.0f} fp64, {triad:.1f} GB/s"
    return (
        f"{c.get('device') or c.get('cpu', 'unknown processor')}, {8 * int(c.get('simd_bytes', 0))}-bit vectors, "
        f"{c.get('compiler', '?')}, Kokkos {c.get('kokkos_version', '?')} ({c.get('execution_space', '?')}), "
        f"{column_name(file) if not c.get('device') else 'GPU'}, {str(c.get('date', ''))[:10]}{roofs}"
    )


def put(path, mark, text):
    """Replaces what stands between <!-- mark --> and <!-- end of mark --> in a file."""
    old = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    if old.count(begin) != 1 or old.count(end) != 1:
        raise results.UnusableFile(f"{path.name}: needs one line '{begin.strip()}' and one '{end}'")
    head, rest = old.split(begin)
    tail = rest.split(end)[1]
    new = f"{head}{begin}\n{text}\n\n{end}{tail}"
    if new != old:
        path.write_text(new, encoding="utf-8")


def count(lines):
    verdicts = [cell.verdict for line in lines if line.bar for cell in line.cells]
    return {word: verdicts.count(word) for word in ("ok", "below", "disturbed", "missing")}


def measured(lines):
    return [line for line in lines if any(cell.verdict != "missing" for cell in line.cells)]


def summary(lines):
    n = count(lines)
    text = (
        f"{sum(n.values()) - n['missing']} bars measured: {n['ok']} hold, {n['below']} below, "
        f"{n['disturbed']} disturbed"
    )
    shown = measured(lines)
    absent = dict.fromkeys(re.sub(r",.*", "", line.what) for line in lines if line not in shown)
    for line in shown:
        absent.pop(re.sub(r",.*", "", line.what), None)
    return text + (f". Not measured: {'; '.join(absent)}" if absent else "")


def write_docs(root, hosts, host, step_files, gpu_files, gpu):
    where = "\n".join(f"- {configuration(file)}" for file in [*hosts, *gpu_files])
    notes = [f"- {column_name(file)}: {complaint}" for file in hosts for complaint in results.probe_complaints(file)]
    page = root / "docs/performance.md"
    text = f"{where}\n\n{bars_markdown(hosts, host)}\n\n{summary(host + ([] if gpu_files else gpu))}."
    if notes:
        text += "\n\nThe probes of these runs were not steady:\n\n" + "\n".join(notes)
    if gpu_files:
        text += f"\n\n{bars_markdown(gpu_files, gpu)}"
    put(page, "bars", text)
    parts = []
    for file in hosts:
        for scalar in ("f32", "f64"):
            if file.of("main", type=scalar):
                parts.append(f"{TYPE_NAMES[scalar]}, {column_name(file)}, causal:\n\n{results_markdown(file, scalar)}")
    if step_files and (table := step_markdown(step_files)):
        parts.append(f"Decoding:\n\n{table}")
    put(page, "results", "\n\n".join(parts))
    fastest = hosts[-1]
    put(
        root / "README.md",
        "results",
        f"{configuration(fastest)}; fp32, causal:\n\n{results_markdown(fastest, 'f32')}\n\n{summary(host)}.",
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Prints the table of bars.")
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/performance.md and README.md"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        files = [results.load(path) for path in options.files]
        gpu_files = [file for file in files if file.context.get("device")]
        hosts = sorted(
            (file for file in files if file not in gpu_files and file.of("main")), key=lambda file: file.threads
        )
        step_files = sorted((file for file in files if file.of("step")), key=lambda file: file.threads)
        if not hosts and not gpu_files:
            raise results.UnusableFile("no file has rows of the group main")
        host, gpu = host_lines(hosts), gpu_lines(hosts, gpu_files)
        if options.write_docs:
            if not hosts:
                raise results.UnusableFile("the documents need results of perf/attention")
            write_docs(options.root, hosts, host, step_files, gpu_files, gpu)
    except results.UnusableFile as error:
        print(f"bars: {error}", file=sys.stderr)
        return 2
    except (KeyError, ValueError) as error:
        print(f"bars: a row lacks the counter {error}: results of another version?", file=sys.stderr)
        return 2

    for file in [*hosts, *gpu_files]:
        print(configuration(file))
    table = bars_markdown if options.markdown else text_table
    if hosts:
        print("\n" + table(hosts, host + ([] if gpu_files else gpu)))
    if gpu_files:
        print("\n" + table(gpu_files, gpu))
    for file in hosts:
        for complaint in results.probe_complaints(file):
            print(f"note: {column_name(file)}: {complaint}")
    print("\n" + summary(host + gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
