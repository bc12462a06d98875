# SPDX-License-Identifier: BSD-3-Clause
"""Results of the benchmark programs, read from their JSON files; used by the scripts beside this one."""

import json
import re
from dataclasses import dataclass, field

# What has to be the same for times to be comparable.
CONFIGURATION = (
    "cpu",
    "threads",
    "execution_space",
    "kokkos_version",
    "compiler",
    "simd_bytes",
    "assertions",
    "device",
    "library",
)

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class UnusableFile(Exception):
    """One line for the user."""


@dataclass(frozen=True)
class Row:
    """One row: `seconds` is the median; the parts of the name are group, passes, variant, type, mask and extents."""

    name: str
    seconds: float
    counters: dict = field(default_factory=dict)
    label: str = ""

    @property
    def disturbed(self):
        return self.counters.get("disturbed", 0) > 0

    @property
    def parts(self):
        return self.name.split("/")

    @property
    def group(self):
        return self.parts[0]

    def part(self, position, default=""):
        return self.parts[position] if position < len(self.parts) else default

    @property
    def passes(self):
        return self.part(1)

    @property
    def variant(self):
        return self.part(2)

    @property
    def type(self):
        return self.part(3)

    @property
    def mask(self):
        return self.part(4)

    @property
    def extents(self):
        found = (re.fullmatch(r"([A-Z][a-z]?)(\d+)", part) for part in self.parts[5:])
        return {match[1]: int(match[2]) for match in found if match}

    @property
    def tokens(self):
        e = self.extents
        return e["B"] * e["H"] * e["N"]

    def __getitem__(self, counter):
        return self.counters[counter]


@dataclass(frozen=True)
class Results:
    path: str
    context: dict
    rows: dict  # name: Row

    @property
    def threads(self):
        return int(self.context.get("threads", 0))

    def of(self, group, **parts):
        """Rows of a group, in the order of the file, whose parts have these values."""
        return [
            row
            for row in self.rows.values()
            if row.group == group and all(getattr(row, key) == value for key, value in parts.items())
        ]


def _fields(entry):
    known = {
        "name",
        "run_name",
        "run_type",
        "repetitions",
        "repetition_index",
        "threads",
        "iterations",
        "real_time",
        "cpu_time",
        "time_unit",
        "family_index",
        "per_family_instance_index",
        "label",
        "error_occurred",
        "error_message",
    }
    return {key: value for key, value in entry.items() if key not in known and isinstance(value, (int, float))}


def load(path):
    """The results in a file. Rows that failed are left out. Raises UnusableFile."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise UnusableFile(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UnusableFile(f"{path}: not a JSON file ({error})") from error
    try:
        rows = {}
        for entry in data["benchmarks"]:
            if entry.get("run_type", "iteration") != "iteration" or entry.get("error_occurred"):
                continue
            name = re.sub(r"/(iterations:\d+|manual_time|real_time)(?=/|$)", "", entry["name"])
            rows[name] = Row(
                name,
                entry["real_time"] * _SECONDS[entry.get("time_unit", "ns")],
                _fields(entry),
                entry.get("label", ""),
            )
        return Results(str(path), dict(data["context"]), rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnusableFile(f"{path}: not a file of results (no {error})") from error


def differences(a, b):
    """The parts of the configuration in which two results differ: (key, in a, in b)."""
    return [
        (key, a.context.get(key, "none"), b.context.get(key, "none"))
        for key in CONFIGURATION
        if a.context.get(key, "none") != b.context.get(key, "none")
    ]


def probe_complaints(results, largest_drift=0.05, least_scaling=0.9):
    """Why the probes at the begin and the end of a run discard it, in words; empty if they do not."""
    if results.context.get("seconds_a_row") == "0":
        return ["a smoke test, in which everything ran once"]
    begin, end = results.rows.get("probes/begin"), results.rows.get("probes/end")
    if begin is None or end is None:
        return ["no probes at begin and end"]
    found = []
    for probe in ("fma_f32_GFLOP/s", "fma_f64_GFLOP/s", "triad_GB/s"):
        a, b = begin[probe], end[probe]
        drift = abs(a - b) / max(a, b)
        if drift > largest_drift:
            name, unit = probe.rsplit("_", 1)
            found.append(f"{name} drifted by {drift:.0%}, from {a:.1f} to {b:.1f} {unit}")
    scaling = min(begin["scaling"], end["scaling"])
    if scaling < least_scaling:
        found.append(f"the FMA rate of all threads was {scaling:.2f} of what one thread promises")
    return found
