# SPDX-License-Identifier: BSD-3-Clause
"""Files of results for the tests beside this file."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf"))

CONTEXT = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "Some CPU",
    "threads": "1",
    "execution_space": "OpenMP",
    "kokkos_version": "3.4.1",
    "compiler": "GCC 12.2.0",
    "simd_bytes": "64",
    "assertions": "off",
}


def row(name, milliseconds=1.0, **counters):
    """An entry as Google Benchmark writes it."""
    return {
        "name": f"{name}/iterations:1/manual_time",
        "run_type": "iteration",
        "iterations": 1,
        "real_time": milliseconds,
        "cpu_time": 1.0,
        "time_unit": "ms",
        **counters,
    }


def timed(name, milliseconds, eff, **counters):
    """A row of a pass with what the programs count."""
    return row(
        name,
        milliseconds,
        **{"eff": eff, "GFLOP/s": 100 * eff, "GB/s": 5.0, "tokens/s": 1e6, "spread": 0.01, "disturbed": 0, **counters},
    )


def probes(fma=100.0, end=None, scaling=1.0):
    def one(when, rate):
        return row(
            f"probes/{when}",
            1.0,
            **{"fma_f32_GFLOP/s": rate, "fma_f64_GFLOP/s": rate / 2, "triad_GB/s": 20.0, "scaling": scaling},
        )

    return [one("begin", fma), one("end", fma if end is None else end)]


class ScriptTest(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def file(self, name, rows, **context):
        path = self.folder / name
        path.write_text(json.dumps({"context": {**CONTEXT, **context}, "benchmarks": rows}))
        return str(path)

    def run_main(self, module, *arguments):
        """(exit status, standard output, standard error) of module.main()."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = module.main(list(map(str, arguments)))
            except SystemExit as exit_:
                status = exit_.code
        return status, out.getvalue(), err.getvalue()

    def assert_one_line(self, text, *parts):
        self.assertEqual(text.count("\n"), 1, text)
        for part in parts:
            self.assertIn(part, text)


if __name__ == "__main__":
    unittest.main()
