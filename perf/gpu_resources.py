#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""What the CUDA compiler says of the kernels: registers, stack, spills.

    perf/gpu_resources.py BUILD.log [--markdown]

The log is that of a build with `ptxas -v` (scripts/gpu-check writes build/gpu-check/build.log). A stack frame is local
memory: an array that did not fit into registers, or spilled ones. Exit status 2 if the log holds no kernel.
"""
import argparse
import pathlib
import re
import subprocess
import sys
from collections import namedtuple

Kernel = namedtuple("Kernel", "name maps type registers stack stores loads")
WALKS = ["key_state", "output", "query_gradient", "query_state", "key_gradient"]


def entries(text):
    """(mangled name, registers, stack, spill stores, spill loads) of every entry function."""
    name, frame = None, None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            name, frame = found[1], None
        elif name and (found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            frame = frame or tuple(map(int, found.groups()))
        elif name and frame and (found := re.search(r"Used (\d+) registers", line)):
            yield (name, int(found[1]), *frame)
            name = None


def demangled(names):
    try:
        result = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return result.stdout.splitlines()


def described(signature):
    """(kernel, feature maps, type of sums) of a kernel of the library, or nothing."""
    kernel = re.search(r"LinAttn::detail::(WalkKernel|StepKernel|ScanStates|FindShifts|ScanShifts|SumParameterParts)\b",
                       signature)
    if not kernel:
        return None
    name = kernel[1]
    if found := re.search(r"\(LinAttn::detail::Walk\)(\d)", signature):
        name = WALKS[int(found[1])]
    maps = re.search(r"LinAttn::(\w+Map)\b", signature)
    scalar = "double" if re.search(r"\bdouble\b", signature.split("Map")[0]) else "float"
    return name, maps[1] if maps else "", scalar


def kernels(text):
    found = list(entries(text))
    unique = {}
    for signature, (_, registers, stack, stores, loads) in zip(demangled([e[0] for e in found]), found):
        if what := described(signature):
            unique[what] = Kernel(*what, registers, stack, stores, loads)
    return sorted(unique.values())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        all_kernels = kernels(arguments.log.read_text(errors="replace"))
    except OSError as error:
        sys.exit(f"{arguments.log}: {error.strerror}")
    if not all_kernels:
        print(f"{arguments.log}: no kernel of the library in what ptxas -v says", file=sys.stderr)
        return 2
    rows = [("kernel", "map", "sums", "registers", "stack", "spilled")]
    rows += [(k.name, k.maps, k.type, str(k.registers), str(k.stack), f"{k.stores}/{k.loads}") for k in all_kernels]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for n, row in enumerate(rows):
        if arguments.markdown:
            print("| " + " | ".join(row) + " |")
            if n == 0:
                print("|" + "---|" * len(row))
        else:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    spilling = sum(1 for k in all_kernels if k.stores or k.loads)
    local = sum(1 for k in all_kernels if k.stack)
    print(f"\n{len(all_kernels)} kernels, {spilling} spill registers, {local} use local memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
