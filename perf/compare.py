#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Compares two files of results, row by row.

    perf/compare.py OLD.json NEW.json [--threshold 5%] [--by eff|time] [--filter REGEX] [--force] [--all]

A row is slower or faster if it changed by more than the threshold, and by more than the spread that either run saw.
By eff (the default) times are compared in units of what the machine could do while they were taken, so that two runs
may meet a machine in different moods; rows without roofs are compared by time. Rows that were disturbed take no part.

Exit status: 0 no row is slower, 1 some are, 2 the files cannot be compared.
"""

import argparse
import math
import re
import sys

import results


def fraction(text):
    """'5%' or '0.05'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a percentage nor a fraction")
    return float(match[1]) / (100 if match[2] else 1)


def change(old, new, by):
    """Time of the new row over that of the old one, and what it was judged by."""
    if by == "eff" and old.counters.get("eff", 0) > 0 and new.counters.get("eff", 0) > 0:
        return old["eff"] / new["eff"], "eff"
    return new.seconds / old.seconds, "time"


def verdict(ratio, threshold, spread):
    limit = 1 + max(threshold, spread)
    return "slower" if ratio > limit else "faster" if ratio < 1 / limit else "same"


def compare(old, new, threshold, by):
    """Rows of both: (verdict, ratio, judged by, old row, new row); 'disturbed' instead of a verdict for those."""
    compared = []
    for name, a in old.rows.items():
        b = new.rows.get(name)
        if b is None or a.group == "probes" or a.seconds <= 0 or b.seconds <= 0:
            continue
        ratio, judged_by = change(a, b, by)
        spread = max(a.counters.get("spread", 0), b.counters.get("spread", 0))
        word = "disturbed" if a.disturbed or b.disturbed else verdict(ratio, threshold, spread)
        compared.append((word, ratio, judged_by, a, b))
    return compared


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Compares two files of results, row by row.")
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument(
        "--threshold", type=fraction, default=0.05, metavar="5%%", help="change that counts (default 5%%)"
    )
    parser.add_argument("--by", choices=("eff", "time"), default="eff")
    parser.add_argument("--filter", default="", metavar="REGEX", help="rows whose name it matches")
    parser.add_argument("--force", action="store_true", help="compare different configurations, too")
    parser.add_argument("--all", action="store_true", help="show rows that stayed the same, too")
    options = parser.parse_args(arguments)
    try:
        pattern = re.compile(options.filter)
        old, new = results.load(options.old), results.load(options.new)
    except (results.UnusableFile, re.error) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    different = results.differences(old, new)
    if different and not options.force:
        words = "; ".join(f"{key} is {a} in {options.old} and {b} in {options.new}" for key, a, b in different)
        print(f"compare: {words} (--force compares nevertheless)", file=sys.stderr)
        return 2
    compared = [row for row in compare(old, new, options.threshold, options.by) if pattern.search(row[3].name)]
    if not compared:
        print(f"compare: {options.old} and {options.new} have no row in common", file=sys.stderr)
        return 2

    shown = [row for row in compared if options.all or row[0] != "same"]
    width = max((len(row[3].name) for row in shown), default=0)
    for word, ratio, judged_by, a, b in sorted(shown, key=lambda row: (row[0], -row[1])):
        print(
            f"{word:9}  {a.name:{width}}  {a.seconds * 1e3:10.4g} ms -> {b.seconds * 1e3:10.4g} ms  "
            f"{ratio:6.3f} by {judged_by}"
        )
    for file in (old, new):
        for complaint in results.probe_complaints(file):
            print(f"note: {file.path}: {complaint}")
    count = {word: sum(row[0] == word for row in compared) for word in ("slower", "faster", "same", "disturbed")}
    judged = [row[1] for row in compared if row[0] != "disturbed"]
    mean = math.exp(sum(map(math.log, judged)) / len(judged)) if judged else math.nan
    alone = len(set(old.rows) ^ set(new.rows))
    print(
        f"{count['slower']} slower, {count['faster']} faster, {count['same']} the same at {options.threshold:.1%}, "
        f"{count['disturbed']} disturbed; geometric mean of new over old {mean:.3f}"
        + (f"; {alone} rows in one file only" if alone else "")
    )
    return 1 if count["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
