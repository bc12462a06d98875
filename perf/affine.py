#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The tables and charts of affine attention: time against elu, dropout, sweeps, memory.

    perf/affine.py FILE.json ... [--write-docs]

The files are those of one or several runs of perf/affine (one for each number of threads) and perf/memory, and of
`perf/peers.py --training` where PyTorch is installed. --write-docs puts the tables into docs/affine.md, between their
marks, and the charts into docs/plots.

A missed bar is no error: the last line counts them, and the exit status is 0. It is 2 if a file cannot be used.
"""

import argparse
import pathlib
import sys
from dataclasses import dataclass

import bars
import plot
import results
from bars import Cell, Line, MISSING, PASSES, TYPE_NAMES, markdown_table
from svg import Axis, Chart, figure

AFFINE_OVER_ELU = 1.10  # time
DROPOUT = 1.50  # time with over time without, D = 64

FORMS = {
    "affine": "affine",
    "affine_dropout": "affine, dropout",
    "affine_center_v": "affine, centred values",
    "affine_max": "affine, largest norm",
    "lln": "lln",
    "affine_states": "a state a token, C++",
    "affine_cumsum": "cumulative sums, PyTorch",
}


def form_name(row):
    return f"{FORMS.get(row.variant, row.variant)}, {TYPE_NAMES[row.type]}"


# ---- bars ------------------------------------------------------------------------------------------------------------


def ratio_line(files, what, group, scalar, d, passes, bar=None):
    cells = []
    for file in files:
        row = bars.one([r for r in file.of(group, passes=passes, type=scalar) if r.extents["D"] == d])
        if row is None:
            cells.append(MISSING)
        elif bar is None:
            cells.append(Cell(f"{row['ratio']:.2f}", "disturbed" if row.disturbed else "shown"))
        else:
            cells.append(bars.at_most(row["ratio"], bar, [row]))
    return Line(f"{what}, {TYPE_NAMES[scalar]}, D = Dv = {d}, {passes}", f"<= {bar:.2f}" if bar else "", cells)


def bar_lines(files):
    lines = []
    for group, norm in (("affine_over_elu", "l2"), ("affine_none_over_elu", "none")):
        for scalar in ("f32", "f64"):
            for d in (64, 128):
                for passes in PASSES:
                    what = f"time of affine ({norm}) over elu"
                    lines.append(ratio_line(files, what, group, scalar, d, passes, AFFINE_OVER_ELU))
    for scalar in ("f32", "f64"):
        for d in (32, 64, 128, 256):
            for passes in PASSES:
                what = "time with dropout over without"
                lines.append(
                    ratio_line(files, what, "dropout_ratio", scalar, d, passes, DROPOUT if d == 64 else None)
                )
    return lines


# ---- times -----------------------------------------------------------------------------------------------------------


def times_markdown(file, group):
    """Forward, backward and both of a group; the shape that a reduced row stands for is in brackets."""
    found = {}
    for row in file.of(group):
        e = row.extents
        key = (row.variant, row.type, row.mask, *(e[name] for name in "BHND"))
        found.setdefault(key, {})[row.passes] = row
    lines = []
    for (variant, scalar, mask, *extents), passes in found.items():
        pair = [passes.get(name) for name in PASSES]
        if None in pair:
            continue
        both = sum(row.seconds for row in pair)
        mark = " (disturbed)" if any(row.disturbed for row in pair) else ""
        lines.append(
            [
                f"{variant}, {TYPE_NAMES[scalar]}, {mask}",
                ", ".join(map(str, extents)) + stands_for(pair[0]),
                *(bars.short_time(row.seconds) for row in pair),
                bars.short_time(both) + mark,
                bars.short_number(pair[0].tokens / both),
                *(f"{row['eff']:.2f}" for row in pair),
            ]
        )
    heads = ["", "B, H, N, D = Dv", "forward", "backward", "both", "tokens/s, both", "eff forward", "eff backward"]
    return markdown_table(heads, lines) if lines else ""


def stands_for(row):
    """' [B, H]' of the whole problem where the row is a reduced one."""
    words = dict(word.split("=") for word in row.label.removeprefix("for ").split() if "=" in word)
    return f" [{words['B']}, {words['H']}]" if {"B", "H"} <= set(words) else ""


def offsets_markdown(files):
    """Errors of gradients where values share an offset; the same with any number of threads."""
    rows = next((file.of("offsets") for file in reversed(files) if file.of("offsets")), [])
    lines = [
        [f"{row.extents['V']:,}", *(f"{row[c]:.1e}" for c in ("error_plain", "error_center_v", "error_centred"))]
        for row in sorted(rows, key=lambda row: row.extents["V"])
    ]
    return markdown_table(["offset", "plain", "`center_v`", "and `Saved::centred`"], lines) if lines else ""


# ---- memory ----------------------------------------------------------------------------------------------------------


def fits(row):
    return row.counters.get("fits", 1) > 0


def forms(files, group):
    """Rows by (form, D), in the order of N."""
    found = {}
    for file in files:
        for row in file.of(group):
            found.setdefault((form_name(row), row.extents["D"]), []).append(row)
    return {key: sorted(rows, key=lambda row: row.extents["N"]) for key, rows in found.items()}


def slope(rows, counter):
    """Bytes for each further row of the tensors; None where that is not known.

    By the hooks between the two longest sequences, since they count exactly; of the process between the shortest and
    the longest, since it is known to a few lots of pages only.
    """
    rows = [row for row in rows if fits(row) and row.counters.get(counter, -1) >= 0]
    if len(rows) < 2:
        return None
    low, high = rows[0] if counter.endswith("_process") else rows[-2], rows[-1]
    return (high[counter] - low[counter]) / (high["tokens"] - low["tokens"])


def fixed(value, digits):
    """Without a sign before 0."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def bytes_text(value):
    """In powers of 1000, with three digits."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def memory_lines(file):
    """What a further row may cost: a number kept, and less than one of temporaries, whatever D."""
    lines = []
    for group in ("memory", "one_head"):
        for (form, d), rows in forms([file], group).items():
            if rows[0].variant in ("affine_states", "affine_cumsum"):
                continue
            what = f"{form}, D = Dv = {d}" + (", one head" if group == "one_head" else "")
            for counter, name in (
                ("kept_hooks", "numbers kept for each further row"),
                ("forward_hooks", "temporaries, forward"),
                ("backward_hooks", "temporaries, backward"),
            ):
                found = slope(rows, counter)
                if found is None:
                    continue
                numbers = found / rows[0]["number_bytes"]
                if counter == "kept_hooks" and rows[0].variant == "affine_center_v":
                    lines.append(Line(f"{name}, {what}", "", [Cell(f"{numbers:.2f}", "shown")]))
                else:
                    lines.append(Line(f"{name}, {what}", "<= 1", [bars.at_most(numbers, 1, [])]))
    return lines


def slopes_markdown(files, group):
    lines = []
    for (form, d), rows in forms(files, group).items():
        if sum(map(fits, rows)) < 2:
            continue
        last = [row for row in rows if fits(row)][-1]
        cells = [form, str(d), f"{4 * last['element_bytes'] * d:.0f}"]
        for counter in ("kept", "forward", "backward"):
            for means in ("hooks", "process"):
                found = slope(rows, f"{counter}_{means}")
                cells.append("-" if found is None else fixed(found, 2 if means == "hooks" else 1))
        for counter in ("forward_hooks", "backward_hooks"):
            cells.append(bytes_text(last[counter]) if counter in last.counters else "-")
        cells[-1] += f" (N = {last.extents['N']:,})"
        lines.append(cells)
    heads = ["", "D = Dv", "q, k, v, o"]
    for what in ("kept", "forward", "backward"):
        heads += [f"{what}, hooks", "process"]
    return markdown_table(heads + ["in all: forward", "backward"], lines) if lines else ""


def kept_markdown(files):
    """Bytes kept at each N."""
    found = forms(files, "memory")
    lengths = sorted({row.extents["N"] for rows in found.values() for row in rows})
    lines = []
    for (form, d), rows in found.items():
        at = {row.extents["N"]: row for row in rows}
        cells = []
        for n in lengths:
            row = at.get(n)
            if row is None:
                cells.append("-")
            elif fits(row):
                cells.append(bytes_text(row["kept_hooks"]))
            else:
                cells.append(f"does not fit ({bytes_text(row['kept_model'])})")
        lines.append([form, str(d), *cells])
    return markdown_table(["", "D = Dv", *(f"N = {n:,}" for n in lengths)], lines) if lines else ""


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    heads: int
    d: int
    n: int

    @property
    def weights(self):
        """12 K."""
        return 12 * self.parameters

    @property
    def activations(self):
        """60 L H D N."""
        return 60 * self.layers * self.heads * self.d * self.n

    @property
    def saved(self):
        """B H N (4 elements of D + a number) of a layer, fp32, B = 1."""
        return self.heads * self.n * (4 * 4 * self.d + 4)

    @property
    def transient(self):
        """dy, dq, dk, dv of a layer."""
        return self.heads * self.n * 4 * 4 * self.d


MODELS = (
    Model("TinyLlama", 1.1001e9, 22, 32, 64, 2048),
    Model("Llama-3.2-1B", 1.2358e9, 16, 32, 64, 4096),
    Model("Pythia-1.4B", 1.4146e9, 24, 16, 128, 8192),
)


def models_markdown(files):
    lines = []
    for model in MODELS:
        row = bars.one(
            [
                row
                for file in files
                for row in file.of("layer", variant="affine")
                if [row.extents[e] for e in "BHND"] == [1, model.heads, model.n, model.d]
            ]
        )
        cells = [
            f"{model.name}, N = {model.n:,}",
            *(bytes_text(v) for v in (model.weights, model.activations, model.activations / model.layers)),
            bytes_text(model.saved),
        ]
        if row is None:
            cells += ["-", bytes_text(model.transient), "-"]
        else:
            cells += [
                measured(row["tensors_hooks"] + row["kept_hooks"], row["saved_process"]),
                bytes_text(model.transient),
                measured(row["gradients_hooks"] + row["backward_hooks"], row["transient_process"]),
            ]
        lines.append([*cells, bytes_text(model.layers * model.saved)])
    return markdown_table(
        ["B = 1, fp32", "12 K", "60 L H D N", "of it a layer"]
        + ["ours, a layer: saved", "measured", "transient", "measured", "saved, L layers"],
        lines,
    )


def measured(hooks, process):
    return bytes_text(hooks) + ("" if process < 0 else f", {bytes_text(process)}")


# ---- charts ----------------------------------------------------------------------------------------------------------


def time_charts(files):
    nanoseconds = lambda row: row.seconds / row.tokens * 1e9
    found = []
    for group, extent, axis, title in (
        ("n_sweep", "N", Axis("N", log=2), "Time of a token against N, D = 32"),
        ("d_sweep", "D", Axis("D = Dv", log=2), "Time of a token against D, N = 8,192"),
    ):
        chart = Chart(title, axis, Axis("time of a token of a head, ns", log=10))
        for file in files:
            for passes in PASSES:
                rows = [row for row in plot.steady(file, group, passes=passes) if row.extents["B"] == 1]
                rows.sort(key=lambda row: row.extents[extent])
                label = ", ".join(filter(None, [passes, plot.tag(file, files)]))
                chart.line(
                    label,
                    [row.extents[extent] for row in rows],
                    [nanoseconds(row) for row in rows],
                    dashed=passes == "backward",
                )
        found.append(chart)
    return found


def dropout_charts(files):
    ratio = Chart(
        "Time with dropout (p = 0.1) over without, fp32", Axis("D = Dv", log=2), Axis("ratio", low=0)
    )
    times = Chart("Time of a token, fp32", Axis("D = Dv", log=2), Axis("time of a token of a head, ns", log=10))
    for file in files:
        for passes in PASSES:
            rows = plot.steady(file, "dropout_ratio", passes=passes, type="f32")
            rows.sort(key=lambda row: row.extents["D"])
            ds = [row.extents["D"] for row in rows]
            label = ", ".join(filter(None, [passes, plot.tag(file, files)]))
            ratio.line(label, ds, [row["ratio"] for row in rows], dashed=passes == "backward")
            if file is files[-1]:
                times.line(f"{label}, without", ds, [row["first"] * 1e9 for row in rows], dashed=passes == "backward")
                times.line(f"{label}, dropout", ds, [row["second"] * 1e9 for row in rows], dashed=passes == "backward")
    if ratio.series:
        ratio.level(DROPOUT, "bar, D = 64")
    return [ratio, times]


def memory_charts(files):
    kept = Chart("Kept beside q, k, v, o, fp32", Axis("N", log=2), Axis("bytes a head", log=10))
    taken = Chart("Temporaries of the backward pass, fp32", Axis("N", log=2), Axis("bytes, all heads", log=10))
    heads = lambda row: row.extents["B"] * row.extents["H"]
    for (form, d), rows in forms(files, "memory").items():
        if rows[0].type != "f32" or rows[0].variant not in ("affine", "affine_states", "affine_cumsum", "lln"):
            continue
        usable = [row for row in rows if fits(row)]
        name = form.removesuffix(", fp32")
        if rows[0].variant not in ("affine", "lln") or d == 64:  # the others coincide
            kept.line(
                f"{name}, D = {d}", [r.extents["N"] for r in usable], [r["kept_hooks"] / heads(r) for r in usable]
            )
        beyond = [row for row in rows if not fits(row)]
        if beyond:
            kept.line(
                f"D = {d}, does not fit",
                [row.extents["N"] for row in beyond],
                [row["kept_model"] / heads(row) for row in beyond],
                style=len(kept.series) - 1,
                joined=False,
            )
        if rows[0].variant in ("affine", "lln"):
            taken.line(f"{name}, D = {d}", [r.extents["N"] for r in usable], [r["backward_hooks"] for r in usable])
        if rows[0].variant == "affine" and d == 64:
            inputs = [4 * r["element_bytes"] * d * r.extents["N"] for r in usable]
            kept.line("q, k, v, o, D = 64", [r.extents["N"] for r in usable], inputs, dashed=True)
    return [kept, taken]


def charts(times, memory):
    """The text of each file. A chart whose rows were all disturbed says that there are no data."""
    found = {
        "affine_time.svg": (time_charts(times), times),
        "affine_dropout.svg": (dropout_charts(times), times),
        "affine_memory.svg": (memory_charts(memory), memory),
    }
    return {name: figure(drawn, caption=plot.caption(files)) for name, (drawn, files) in found.items()}


# ---- documents -------------------------------------------------------------------------------------------------------

SWEEPS = (
    ("n_sweep", "H = 16, D = 32, against N"),
    ("d_sweep", "N = 8,192, against D"),
    ("heads", "(H, D) of ViT-B, DiT-S, TinyLlama and Llama-3.2-1B, Pythia-1.4B, Pythia-14M"),
    ("vision", "Without a mask, at the lengths of ViT and DiT"),
)


def paragraphs(parts):
    return "\n\n".join(part for part in parts if part)


def write_docs(root, times, memory, lines):
    page = root / "docs/affine.md"
    where = "\n".join(f"- {bars.configuration(file)}" for file in times)
    notes = [
        f"- {bars.column_name(file)}: {complaint}" for file in times for complaint in results.probe_complaints(file)
    ]
    bars.put(
        page,
        "affine bars",
        paragraphs(
            [
                where,
                bars.bars_markdown(times, lines),
                f"{bars.summary(lines)}.",
                "The probes of these runs were not steady:\n\n" + "\n".join(notes) if notes else "",
            ]
        ),
    )
    parts = []
    for file in times:
        for group, title in (("main", "Beside elu"), ("dropout", "Dropout")):
            if table := times_markdown(file, group):
                parts += [f"{title}, {bars.column_name(file)}:", table]
    for group, title in SWEEPS:
        file = next((file for file in reversed(times) if file.of(group)), None)
        if file is not None:
            parts += [f"{title}, {bars.column_name(file)}:", times_markdown(file, group)]
    bars.put(page, "affine times", paragraphs(parts))
    bars.put(page, "affine offsets", offsets_markdown(times))
    bars.put(
        page,
        "affine memory",
        paragraphs(
            [
                "Bytes for each further token of a head, many heads:",
                slopes_markdown(memory, "memory"),
                "One head, whose sequence is cut into segments:",
                slopes_markdown(memory, "one_head"),
                "Bytes kept, all heads:",
                kept_markdown(memory),
                f"{bars.summary(memory_lines(memory[0]))}: at most one number kept, and at most one of temporaries in "
                "each pass, for each further token of a head.",
            ]
        ),
    )
    bars.put(page, "affine models", models_markdown(memory))
    (root / "docs/plots").mkdir(exist_ok=True)
    for name, text in charts(times, memory).items():
        (root / "docs/plots" / name).write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Prints the tables of affine attention.")
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/affine.md and the charts into docs/plots"
    )
    parser.add_argument("--root", type=pathlib.Path, default=bars.ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        files = [results.load(path) for path in options.files]
        times = sorted((f for f in files if f.of("main") or f.of("dropout_ratio")), key=lambda file: file.threads)
        memory = [f for f in files if f.of("memory") or f.of("layer")]
        memory.sort(key=lambda file: "library" in file.context)  # ours first
        if not times and not memory:
            raise results.UnusableFile("no file has rows of perf/affine or perf/memory")
        lines = bar_lines(times)
        of_memory = memory_lines(memory[0]) if memory else []
        if options.write_docs:
            if not times or not memory:
                raise results.UnusableFile("--write-docs needs the results of both perf/affine and perf/memory")
            write_docs(options.root, times, memory, lines)
    except results.UnusableFile as error:
        print(f"affine: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"affine: a row has no counter {error}; is the file from another version?", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"affine: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    for file in times:
        print(bars.configuration(file))
        for complaint in results.probe_complaints(file):
            print(f"note: {complaint}")
    if memory:
        for table in (slopes_markdown(memory, "memory"), slopes_markdown(memory, "one_head"), models_markdown(memory)):
            if table:
                print(f"\n{table}")
    if table := offsets_markdown(times):
        print(f"\n{table}")
    for file in memory[:1]:
        print(f"\n{bars.text_table([file], of_memory)}")
    if times:
        print(f"\n{bars.text_table(times, lines)}")
    print(f"\n{bars.summary(lines + of_memory)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
