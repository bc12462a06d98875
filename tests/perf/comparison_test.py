# SPDX-License-Identifier: BSD-3-Clause

import copy
import json
import unittest
from xml.etree import ElementTree

from support import ScriptTest

import comparison
import plot

METHODS = ["softmax", "lln", "lln-diag", "identity"]
LENGTHS = {"table2": [512, 1024, 4096, 8192, 16384], "lra": [4096, 2048, 4096, 1024, 1024], "affine": [1000, 2000]}
CURVES = ["softmax", "lln_authors", "lln_table", "identity"]
SIGMAS = [0.5, 1.0]
MARKS = ("setup", "claims", "table2", "lra", "affine", "crossover", "errors", "quality", "real")


def seconds(method, n):
    """Exact attention is quadratic and meets LLN at N = 1024; the block part adds a quarter; identity never wins."""
    return {"softmax": 1e-8 * n * n, "lln": 1e-8 * 1024 * n, "lln-diag": 1.25e-8 * 1024 * n, "identity": 1.0 * n}[method]


def rows(method, lengths, value):
    return [[value(method, n) * part for part in (0.25, 0.75, 1.0)] for n in lengths]


def one_list(lengths):
    found = {
        "about": "Shapes",
        "batch": [1.0] * len(lengths),
        "n": [float(n) for n in lengths],
    }
    for method in METHODS:
        found[method] = {
            "status": [[1.0] * 3 for _ in lengths],
            "seconds": rows(method, lengths, seconds),
            "peak_bytes": rows(method, lengths, lambda m, n: (2 if m == "softmax" else 1) * 2**20 * n / 512),
            "error": rows(method, lengths, lambda *_: 4e-7),
            "error_of": [[2.0] * 3 for _ in lengths],
        }
    return found


def study():
    def instruments(draws):
        return {
            "output_error": [[0.25, 0.75]] * draws,
            "entropy": [[7.0, 8.0]] * draws,
            "spectral_gap": [[0.5, 0.5]] * draws,
            "logvar": [[1.0, 3.0]] * draws,
        }

    gaussian = {"sigma_sm": SIGMAS, **{name: instruments(len(SIGMAS)) for name in CURVES}}
    gaussian["identity"].update(entropy=[[None, None]] * 2, absent="entropy and logvar: the matrix has entries below 0")
    real = {"file": "real.h5", **{name: instruments(3) for name in CURVES}}
    return {
        "cpu": "Some CPU",
        "kokkos": "3.4.1",
        "space": "openmp",
        "threads": 2,
        "dtype": "f32",
        "date": "2026-01-02",
        "memory-limit": 2.0**33,
        "time-cap": 30.0,
        "seed": 0,
        "quick": 0,
        "real": "real.h5",
        "lists": ", ".join(LENGTHS),
        "methods": ", ".join(METHODS),
        **{name: one_list(lengths) for name, lengths in LENGTHS.items()},
        "quality": {"curves": ", ".join(CURVES), "gaussian": gaussian, "real": real},
    }


class ComparisonTest(ScriptTest):
    def path(self, data, command="study", name="study.json"):
        path = self.folder / name
        path.write_text(json.dumps({"linattn": "0.1.0", "command": command, "study": data}))
        return str(path)

    def loaded(self, data=None):
        return comparison.load(self.path(data or study()))


class Numbers(ComparisonTest):
    def test_crossing_is_interpolated_in_logarithms(self):
        exact = [(n, float(n * n)) for n in (100, 200, 400, 800)]
        # n^2 / (300 n): 1 at n = 300, which lies between 200 and 400
        self.assertEqual(comparison.crossing(exact, [(n, 300.0 * n) for n, _ in exact])[0], "300")
        self.assertEqual(comparison.crossing(exact, [(n, 50.0 * n) for n, _ in exact])[0], "<= 100")
        self.assertEqual(comparison.crossing(exact, [(n, 900.0 * n) for n, _ in exact]), ("> 800", None))
        self.assertEqual(comparison.crossing(exact, [(n, 300.0 * n) for n, _ in exact[:2]])[0], "> 200")
        self.assertEqual(comparison.crossing([], [(100, 1.0)]), ("-", None))
        # faster once, but not from there on
        self.assertEqual(comparison.crossing(exact, [(100, 1.0), (200, 5e4), (400, 2e5), (800, 1e6)])[0], "> 800")

    def test_longest_in_the_same_time(self):
        exact = [(n, 1e-6 * n * n) for n in (100, 1000, 10000)]
        n, inside = comparison.longest(exact, 4.0)
        self.assertAlmostEqual(n, 2000, places=6)
        self.assertTrue(inside)
        n, inside = comparison.longest(exact, 400.0)
        self.assertAlmostEqual(n, 20000, places=5)
        self.assertFalse(inside)

    def test_paper_ratios(self):
        for kind, known in ((0, "7.1 3.3 7.0 2.2 3.3"), (1, "10.4 5.4 5.6 2.9 2.9")):
            self.assertEqual(" ".join(f"{value:.1f}" for value in comparison.paper_lra("lln-diag", kind)), known)


class Tables(ComparisonTest):
    def test_claims(self):
        text = comparison.claims_markdown(self.loaded())
        # LLN takes 1024 x 16384 units at 16384, exact attention then does sqrt(1024 x 16384) = 4096 tokens
        self.assertEqual(text.count("| holds: 4.0 times; exact attention does 4096 tokens in"), 2)
        self.assertIn("| 2.00, 2.00 (attention) |", text)
        self.assertIn("| 4.0 (attention) |", text)
        self.assertIn("| +25 % (attention) |", text)
        self.assertIn("7.1, 3.3, 7.0, 2.2, 3.3 | 3.2, 1.6, 3.2, 0.8, 0.8 |", text)

    def test_a_claim_that_fails_is_said_to(self):
        data = study()
        for row in data["table2"]["lln"]["seconds"]:
            row[:] = [2 * value for value in row]
        self.assertEqual(comparison.claims_markdown(self.loaded(data)).count("does not hold: 2.8 times"), 2)

    def test_rows_that_were_left_out(self):
        data = study()
        for status, row in ((2, 4), (3, 3), (4, 2), (0, 1)):
            data["table2"]["softmax"]["status"][row] = [float(status)] * 3
            data["table2"]["softmax"]["seconds"][row] = [None] * 3
        text = comparison.time_markdown(self.loaded(data), "table2")
        self.assertIn("| softmax | 2.62 ms | open | - | time | OOM |", text)

    def test_ratios(self):
        loaded = self.loaded()
        self.assertIn("| lln | 0.5 | 1 | 4 | 8 | 16 |", comparison.ratios_markdown(loaded, "table2", "seconds"))
        text = comparison.lra_markdown(loaded)
        self.assertIn("| lln-diag | time | 3.2 (7.1) | 1.6 (3.3) |", text)
        self.assertIn("| lln | memory | 2 (-) |", text)
        self.assertIn("| reformer | time | open (4.7) |", text)
        self.assertIn("| skyformer | memory | open (5.6) |", text)

    def test_crossover(self):
        text = comparison.crossover_markdown(self.loaded())
        self.assertIn("| lln | 1024 | 1024 | 1024 | 1024 |", text)
        self.assertIn("| identity | > 16384 |", text)

    def test_errors_say_of_what(self):
        self.assertIn("| lln | 1.0e-07 (one head) | 3.0e-07 (one head) |", comparison.errors_markdown(self.loaded()))

    def test_quality(self):
        loaded = self.loaded()
        self.assertIn("| lln_table | 0.5 | 0.5 |", comparison.quality_markdown(loaded, "output_error"))
        self.assertIn("| lln_table | 7.500 | 7.500 |", comparison.quality_markdown(loaded, "entropy"))
        self.assertIn("| identity | - | - |", comparison.quality_markdown(loaded, "entropy"))
        self.assertIn("| lln_table | 0.5 | 7.5 | 0.5 | 2 |", comparison.real_markdown(loaded))
        self.assertIn("- identity: entropy and logvar: the matrix has entries below 0.", comparison.absent_text(loaded))


class Documents(ComparisonTest):
    def test_printed(self):
        status, out, err = self.run_main(comparison, self.path(study()))
        self.assertEqual((status, err), (0, ""))
        self.assertIn("Some CPU, Kokkos 3.4.1, openmp, 2 threads, f32, 2026-01-02; at most 8.0 GiB and 30 s", out)

    def test_lists_of_ones_own(self):
        data = study()
        data["user"] = data.pop("table2")
        del data["lra"], data["affine"]
        data["lists"] = "user"
        status, out, err = self.run_main(comparison, self.path(data))
        self.assertEqual((status, err), (0, ""))
        self.assertIn("| lln | 0.5 | 1 | 4 |", out)

    def test_written(self):
        (self.folder / "docs").mkdir()
        page = self.folder / "docs/comparison.md"
        page.write_text("".join(f"<!-- comparison {m} -->\n<!-- end of comparison {m} -->\n" for m in MARKS))
        arguments = (self.path(study()), "--write-docs", "--root", self.folder)
        for _ in range(2):  # the second time changes nothing
            status, _, err = self.run_main(comparison, *arguments)
            self.assertEqual((status, err), (0, ""))
        self.assertEqual(page.read_text().count("| +25 % (attention) |"), 1)
        drawn = sorted(path.name for path in (self.folder / "docs/plots").iterdir())
        self.assertEqual(drawn, [f"comparison_{name}.svg" for name in ("memory", "quality", "ratios", "time")])
        for name in drawn:
            ElementTree.parse(self.folder / "docs/plots" / name)

    def test_documents_need_all(self):
        for change in ({"lists": "table2, lra"}, {"quick": 1}, {"methods": "lln, lln-diag"}):
            path = self.path({**study(), **change})
            status, _, err = self.run_main(comparison, path, "--write-docs", "--root", self.folder)
            self.assertEqual(status, 2)
            self.assert_one_line(err, "--write-docs needs")

    def test_page_of_the_project_has_the_marks_and_names_the_charts(self):
        text = (comparison.bars.ROOT / "docs/comparison.md").read_text(encoding="utf-8")
        for mark in MARKS:
            self.assertEqual(text.count(f"<!-- comparison {mark} -->\n"), 1, mark)
        self.assertEqual(set(comparison.tables(self.loaded())), set(MARKS))
        for name in comparison.charts_of(self.loaded()):
            self.assertEqual(text.count(f"plots/{name}"), 1, name)

    def test_unusable_files(self):
        lacking, shorter = copy.deepcopy(study()), copy.deepcopy(study())
        del lacking["table2"]["lln"]["status"]
        shorter["table2"]["lln"]["status"] = [[]]
        for path, part in (
            (self.path(lacking, name="l.json"), "table2/lln/status"),
            (self.path(shorter, name="s.json"), "other extents"),
            (self.path(study(), "moments", "m.json"), "not a file of linattn study"),
            (self.folder / "none.json", "none.json"),
        ):
            status, _, err = self.run_main(comparison, path)
            self.assertEqual(status, 2, path)
            self.assert_one_line(err, part)

    def test_plot_takes_a_study(self):
        out = self.folder / "out.svg"
        status, _, err = self.run_main(plot, self.path(study()), "-o", out)
        self.assertEqual((status, err), (0, ""))
        texts = [e.text for e in ElementTree.parse(out).getroot().iter("{http://www.w3.org/2000/svg}text")]
        for title in ("Both, full, H = 12, D = 64", "Time of exact attention over the method, LRA"):
            self.assertIn(title, texts)
        self.assertIn("linattn study --real real.h5; Some CPU, 2 threads, f32, 2026-01-02", texts)


if __name__ == "__main__":
    unittest.main()
