#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Rewrites include/linattn/analysis/moment_table.hpp: what moment matching inverts.

For Gaussian q, k of N = 1024 rows, with alpha sigma_q = beta sigma_k = sqrt(st2 / 2), the tables hold the variance of
log P over all entries of the matrix of LLN attention and the deficit log2 N - H of its mean row entropy H in bits; and
that deficit for softmax attention of logits of variance sigma_sm^2. Every q and k drawn is first brought to mean 0 and
sample deviation 1, as the rules divide by the deviation that they measure.

    make_moment_table.py            # a few minutes with a NumPy that has a fast BLAS
    make_moment_table.py --check    # draws anew and compares: exit 1 where the two differ by more than 1e-3

Draws of one D are added until the standard error of every entry is below TARGET of it, or there are MOST.
"""

import argparse
import os
import re
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("make_moment_table.py: the Python module numpy is missing (Debian: python3-numpy)")

HEADER = os.path.join(os.path.dirname(__file__), "..", "include", "linattn", "analysis", "moment_table.hpp")
SEED = 20250131
N = 1024
DIMENSIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ST2 = (0.5, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 26, 34, 50, 70)
SM2 = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
TARGET = 0.005
LEAST, MOST = 24, 160


def standard(rng, d):
    x = rng.standard_normal((N, d))
    return ((x - x.mean()) / x.std(ddof=1)).astype(np.float32)


def lln(q, k, st2):
    """Var(log P) and log2 N - H."""
    s = np.float32(np.sqrt(st2 / 2))
    relative = np.exp(s * q) @ np.exp(s * k).T  # becomes N P
    relative *= np.float32(N) / relative.sum(axis=1, keepdims=True)
    log = np.log(relative)
    variance = float(np.vdot(log, log)) / log.size - float(log.mean()) ** 2
    return variance, float(np.vdot(relative, log)) / (log.size * np.log(2))


def softmax(scores, sm2):
    """log2 N - H."""
    log = np.float32(np.sqrt(sm2)) * scores
    log -= log.max(axis=1, keepdims=True)
    relative = np.exp(log)
    scale = np.float32(N) / relative.sum(axis=1, keepdims=True)
    relative *= scale
    log += np.log(scale)
    return float(np.vdot(relative, log)) / (log.size * np.log(2))


def draw(d, number):
    """Rows of the three tables for one q and k."""
    rng = np.random.default_rng([SEED, d, number])
    q, k = standard(rng, d), standard(rng, d)
    scores = (q @ k.T) / np.float32(np.sqrt(d))
    both = [lln(q, k, st2) for st2 in ST2]
    return [[b[0] for b in both], [b[1] for b in both], [softmax(scores, sm2) for sm2 in SM2]]


def tables_of(d):
    """Means over the draws, standard errors relative to them, deviations of one draw relative to them, draws."""
    draws = []
    while True:
        draws.append(draw(d, len(draws)))
        if len(draws) < LEAST:
            continue
        sample = np.array(draws)
        mean, deviation = sample.mean(axis=0), sample.std(axis=0, ddof=1)
        error = deviation / mean / np.sqrt(len(draws))
        if error.max() < TARGET or len(draws) == MOST:
            return mean, error, deviation / mean, len(draws)


def rows(name, table):
    text = f"inline constexpr double {name}[{len(table)}][{len(table[0])}] = {{\n"
    for row in table:
        text += "    {" + ", ".join(f"{x:.5g}" for x in row[:8]) + ",\n     "
        text += ", ".join(f"{x:.5g}" for x in row[8:]) + "},\n"
    return text + "};\n"


def header(results):
    wide = [r for d, r in zip(DIMENSIONS, results) if d >= 16]
    narrow = [r for d, r in zip(DIMENSIONS, results) if d < 16]
    percent = lambda parts, table: 100 * max(r[1][table].max() for r in parts)  # noqa: E731
    numbers = lambda values: ", ".join(f"{v:g}" for v in values)  # noqa: E731
    return f"""// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// \\file moment_table.hpp
/// Measured log-variances and entropies of LLN and softmax matrices. Written by data/make_moment_table.py.
///
/// Gaussian q, k of {N} rows, from {min(r[3] for r in results)} to {max(r[3] for r in results)} draws for a D. Largest \
standard error of an entry for D >= 16
/// (D < 16) in percent: log_variance {percent(wide, 0):.2g} ({percent(narrow, 0):.2g}), lln_deficit \
{percent(wide, 1):.2g} ({percent(narrow, 1):.2g}), softmax_deficit {percent(wide, 2):.2g} ({percent(narrow, 2):.2g}).

namespace LinAttn::detail::moment_table {{

inline constexpr int dimensions = {len(DIMENSIONS)}, points = {len(ST2)};
/// Head dimensions, the rows of the tables.
inline constexpr double d[dimensions] = {{{numbers(DIMENSIONS)}}};
/// alpha^2 sigma_q^2 + beta^2 sigma_k^2 in equal halves, the columns of log_variance and lln_deficit.
inline constexpr double st2[points] = {{{numbers(ST2)}}};
/// Variance of the logits, the columns of softmax_deficit.
inline constexpr double sm2[points] = {{{numbers(SM2)}}};

/// Var(log P) over all entries of the LLN matrix.
{rows("log_variance", [r[0][0] for r in results])}
/// log2 N - H, with H the mean entropy of the rows of the LLN matrix in bits.
{rows("lln_deficit", [r[0][1] for r in results])}
/// The same of the softmax matrix.
{rows("softmax_deficit", [r[0][2] for r in results])}
/// Standard deviation of log_variance from one draw to the next, relative to it.
{rows("log_variance_deviation", [r[2][0] for r in results])}
}}  // namespace LinAttn::detail::moment_table
"""


def numbers_in(text):
    return [float(x) for x in re.findall(r"(?<![\w.])[0-9][0-9.e+-]*", text[text.index("inline"):])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file that is there")
    arguments = parser.parse_args()
    results = []
    for d in DIMENSIONS:
        results.append(tables_of(d))
        print(f"D = {d}: {results[-1][3]} draws, largest standard error {100 * results[-1][1].max():.2g} %", flush=True)
    text = header(results)
    if not arguments.check:
        with open(HEADER, "w", encoding="utf-8") as file:
            file.write(text)
        return
    with open(HEADER, encoding="utf-8") as file:
        old, new = numbers_in(file.read()), numbers_in(text)
    if len(old) != len(new) or any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(old, new)):
        sys.exit("make_moment_table.py: the tables that were drawn differ from those of " + HEADER)


if __name__ == "__main__":
    main()
