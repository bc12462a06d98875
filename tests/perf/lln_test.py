# SPDX-License-Identifier: BSD-3-Clause

import copy
import json
import unittest
from xml.etree import ElementTree

from support import ScriptTest, probes, row, timed

import lln
import plot
import results

DIMENSIONS, SIGMAS, ST2 = [32.0, 64.0, 128.0], [0.8, 1.0, 1.8], [1.0, 2.0, 4.0, 8.0, 20.0]
TEMPERATURES = [0.6, 1.0, 2.0]
RULES = ["authors", "fit", "table", "entropy"]
KERNELS = ["softmax", "lln_authors", "lln_table", "lln_entropy", "quadratic", "relu", "elu"]
MARKS = ("claims", "softmax", "cross", "variance", "lines", "matching", "histograms", "temperature", "split", "real")


def table(rows, columns, value):
    return [[value(r, c) for c in columns] for r in rows]


def moments():
    """A study of moments in which the proposition with finite D is right, and LLN twice Fenton."""
    sm2 = lambda _, s: s**4
    with_d = lambda d, s: s**4 + s**8 / (2 * d)
    line = lambda _, st2: 0.15 * st2 - 0.35
    growth = lambda d, st2: 0.2 * st2 * 64 / d
    return {
        "rows": 1024,
        "seed": 0,
        "rules": RULES,
        "softmax": {
            "d": DIMENSIONS,
            "sigma": SIGMAS,
            "prop_3_1": table(DIMENSIONS, SIGMAS, sm2),
            "finite_d": table(DIMENSIONS, SIGMAS, with_d),
            "log_variance": table(DIMENSIONS, SIGMAS, with_d),
            "log_variance_error": table(DIMENSIONS, SIGMAS, lambda *_: 0.01),
            "within": table(DIMENSIONS, SIGMAS, sm2),
        },
        "cross": {"rho": [0, 0.5], "predicted": [1, 1.25], "logit_variance": [1.01, 1.26], "c_cross": [0.0, 0.25]},
        "lln": {
            "d": DIMENSIONS,
            "st2": ST2,
            "romeo": table(DIMENSIONS, ST2, line),
            "fenton": table(DIMENSIONS, ST2, lambda *a: 3 * growth(*a)),
            "log_variance_numerator": table(DIMENSIONS, ST2, lambda *a: 2 * growth(*a)),
            "log_variance_numerator_error": table(DIMENSIONS, ST2, lambda *_: 0.01),
            "log_variance": table(DIMENSIONS, ST2, growth),
            "log_variance_error": table(DIMENSIONS, ST2, lambda *_: 0.01),
            "within": table(DIMENSIONS, ST2, growth),
        },
        "lines": {
            "d": DIMENSIONS,
            "first": [4, 6, 6],
            "last": [9.5, 20, 58],
            "numerator": [1, 0, 0],
            "slope": table(DIMENSIONS, range(3), lambda d, i: 0.15 + 0.02 * i),
            "intercept": table(DIMENSIONS, range(3), lambda d, i: -0.35),
            "r2": table(DIMENSIONS, range(3), lambda d, i: 0.99 + 0.001 * i),
        },
        "matching": {
            "sigma": SIGMAS,
            "log_variance_error": [
                [[-0.2, 0.1, 0.01, -0.4] for _ in SIGMAS],
                [[0.3, -0.1, -0.055, -0.5] for _ in SIGMAS],
            ],
            "numerator_error": [[[0.04, 0, 0, 0] for _ in SIGMAS] for _ in range(2)],
            "entropy": [[[9.0, 8.9, 8.8, 9.5] for _ in SIGMAS] for _ in range(2)],
            "softmax_entropy": [[9.5 for _ in SIGMAS] for _ in range(2)],
        },
        "histograms": {
            "edges": [-5.0, -3.0, -1.0, 1.0, 3.0],
            "density": [[0.1, 0.2, 0.15, 0.05] for _ in range(4)],
            "mean": [-0.5, 0, -0.6, -0.7],
            "deviation": [1.0, 0.2, 0.9, 1.0],
            "skewness": [-0.05, 0.5, 0.7, 0.7],
            "excess_kurtosis": [0.1, 1.3, 1.5, 1.4],
        },
    }


def instruments(shape, entropy=5.0, biased=1.0, unbiased=3.0, gap=0.5, logvar=2.0):
    rows, columns = shape
    fill = lambda value: [[value] * columns for _ in range(rows)]
    return {
        "entropy": fill(entropy),
        "entropy_biased": fill(biased),
        "entropy_unbiased": fill(unbiased),
        "spectral_gap": fill(gap),
        "logvar": fill(logvar),
        "log_skewness": fill(0.25),
        "log_kurtosis": fill(1.5),
    }


def diagnose(real=True):
    shape = (len(TEMPERATURES), 2)
    study = {name: instruments(shape) for name in KERNELS}
    for i in range(shape[0]):  # softmax reacts to temperature
        study["softmax"]["entropy"][i] = [8.0 - i, 7.0 - i]
        study["lln_authors"]["entropy"][i] = [8.0 - 2 * i, 7.0 - 2 * i]
    study |= {
        "tokens": 512,
        "head_dimension": 64,
        "draws": 2,
        "seed": 0,
        "sigma_sm": TEMPERATURES,
        "temperature": [1 / s for s in TEMPERATURES],
        "lognormal": {"entropy": [8.7, 8.3, 6.0], "spectral_gap": [0.97, 0.94, None]},
    }
    if real:
        heads = {"sigma_q": [2.0, 1.0], "sigma_k": [1.0, 1.0], "cross": [0.1, 0.2]}
        for group in ("real", "real_gaussian"):
            found = {name: instruments((3, 2)) for name in KERNELS}
            for name in KERNELS[1:4]:
                found[f"{name}_tensor"] = instruments((3, 2), logvar=1.0)
            study[group] = found
        study["real"] |= heads
        study["real"]["lln_table"] = instruments((3, 2), logvar=3.0)
        study["real_file"], study["real_extents"] = "some.h5", {"d": 32}
    return study


def moments_row(scope="head", eff=0.9, scalar="f32", disturbed=0):
    return timed(f"moments/{scope}/sigma/{scalar}/full/B1/H8/N65536/D64/Dv64", 5, eff, disturbed=disturbed)


def features_row(eff, d=64, variant="lln"):
    return timed(f"features/features/{variant}/f32/full/B1/H1/N65536/D{d}/Dv{d}", 9, eff)


def ratio(value, mask="causal"):
    return row(f"lln_diag_over_lln/forward/lln/f32/{mask}/B1/H8/N4096/D64/Dv64", 1, ratio=value, disturbed=0)


class LlnTest(ScriptTest):
    def study(self, command, data, name=None):
        path = self.folder / (name or f"study-{command}.json")
        path.write_text(json.dumps({"linattn": "0.1.0", "command": command, "study": data}))
        return str(path)

    def studies(self):
        return [self.study("moments", moments()), self.study("diagnose", diagnose())]

    def loaded(self, command, data):
        return lln.load(self.study(command, data))


class Tables(LlnTest):
    def test_proposition_3_1(self):
        text = lln.softmax_markdown(self.loaded("moments", moments()))
        # 1.8: sigma_sm^2 = 10.4976, finite D = 64 adds 8.2 %, D = 32 16.4 %
        last = "| 1.8 | 10.5 | 11.36 | 11.36 ± 0.01 | 10.5 | +16.4 % | +0.0 % | +8.2 % | +0.0 % | +4.1 % | +0.0 % |"
        self.assertIn(last, text)

    def test_proposition_4_1(self):
        text = lln.lln_markdown(self.loaded("moments", moments()))
        # the line; D = 32, 64, 128: Fenton, numerator, matrix; within rows
        self.assertIn("| 4 | 0.25 | 4.8 | 3.2 | 1.6 | 2.4 | 1.6 | 0.8 | 1.2 | 0.8 | 0.4 | 0.8 |", text)

    def test_lines(self):
        text = lln.lines_markdown(self.loaded("moments", moments()))
        self.assertIn("| 64 | Var(ln w) on [4, 9.5] | 0.1500 | -0.350 | 0.9900 | 2.12 |", text)
        self.assertIn("| 128 | Var(ln P) on [6, 58] | 0.1900 | -0.350 | 0.9920 |", text)

    def test_matching(self):
        study = self.loaded("moments", moments())
        same, one = lln.matching_markdown(study, True), lln.matching_markdown(study, False)
        self.assertIn("| 1.8 | 10.5 | -20.0 % | +10.0 % | +1.0 % | -40.0 % | +4.0 % | 9.50 | 9.00 | 8.90 |", same)
        self.assertIn("| 1.8 | 3.24 | +30.0 % | -10.0 % | -5.5 % | -50.0 % |", one)

    def test_temperature_is_a_mean_with_the_deviation_of_draws(self):
        study = self.loaded("diagnose", diagnose())
        self.assertIn("| 1 | 1.00 | 8.300 | 6.500 ± 0.71 | 5.500 ± 0.71 | 5.000 |",
                      lln.temperature_markdown(study, "entropy", 3))
        self.assertIn("| 2 | 0.50 | - | 0.500 |", lln.temperature_markdown(study, "spectral_gap", 3))

    def test_split(self):
        text = lln.split_markdown(self.loaded("diagnose", diagnose()))
        self.assertIn("| 0.6 | 1.000 + 3.000 (25 %) |", text)

    def test_real_heads_stand_in_the_order_of_their_variance(self):
        text = lln.real_markdown(self.loaded("diagnose", diagnose()))
        first = "| 1 | 1.00 | 0.200 | 1.02 | 2.00 | 2.00 | 0.25 | 1.5 | +0 % | -50 % | +50 % | -50 % | 5.00 |"
        self.assertIn(first, text)
        self.assertLess(text.index(first), text.index("| 0 | 4.00 | 0.100 | 4.25 |"))
        means = lln.real_means_markdown(self.loaded("diagnose", diagnose()))
        self.assertIn("| LLN, table, head | 3.00 | 5.00 | 1.00 | 3.00 | 0.50 | 2.00 |", means)
        self.assertIn("| LLN, table, tensor | 1.00 |", means)

    def test_claims(self):
        text = lln.claims_markdown(*(lln.load(path) for path in self.studies()))
        for part in (
            "D = 64: +0.8 % at sigma_sm^2 = 1, +8.2 % at 10.5; with sigma_sm^4 / 2D at most +0.0 %",
            "Var(ln w), D = 64: +50 % at st2 = 1",
            "over Var(ln P): +200 % at 1",
            "R^2 of the regressions 0.990 to 0.992",
            "authors -20 % to +30 %, fit -10 % to +10 %, table -5.5 % to +1.0 %",
            "entropy rises at every step, by 2.0 bits (SA) and 4.0",
            "entropy changes by 0.000 and 0.000 bits",
            "25 % (authors) and 25 % (table) is biased",
            "sigma_sm^4 / 2D: -53 % to +97 %",
            "over softmax attention: +50 % to +50 %",
        ):
            self.assertIn(part, text)

    def test_claims_that_fail_are_said_to(self):
        data = diagnose()
        data["lln_authors"]["entropy"][2] = [9.0, 9.0]
        text = lln.claims_markdown(self.loaded("moments", moments()), self.loaded("diagnose", data))
        self.assertIn("entropy rises not at every step", text)


class Bars(LlnTest):
    def cells(self, *rows):
        file = results.load(self.file("a.json", [*probes(), *rows]))
        return {line.what: line.cells[0] for line in lln.bar_lines([file])}

    def test_moments(self):
        what = "bytes/s of moments over the triad, fp32, head, B, H, N, D = 1, 8, 65536, 64"
        self.assertEqual(self.cells(moments_row(eff=0.8))[what].verdict, "ok")
        self.assertEqual(self.cells(moments_row(eff=0.79))[what].verdict, "below")
        self.assertEqual(self.cells(moments_row(eff=0.9, disturbed=1))[what].verdict, "disturbed")

    def test_features(self):
        what = "O(N D^2) part of diagnose, {}, fp32, full, H, N, D = 1, 65536, {}: eff"
        self.assertEqual(self.cells(features_row(0.3))[what.format("lln", 64)].verdict, "ok")
        self.assertEqual(self.cells(features_row(0.29))[what.format("lln", 64)].verdict, "below")
        self.assertEqual(self.cells(features_row(0.1, d=32))[what.format("lln", 32)].verdict, "shown")
        self.assertEqual(self.cells(features_row(0.1, variant="elu"))[what.format("elu", 64)].verdict, "shown")

    def test_calls_have_times_only(self):
        name = "calls/call/lln/f32/causal/B1/H1/N65536/D64/Dv64"
        cell = self.cells(row(name, 250, disturbed=0))[
            "diagnose with 256 sampled rows, lln, fp32, causal, H, N, D = 1, 65536, 64: time"
        ]
        self.assertEqual((str(cell), cell.verdict), ("250 ms", "shown"))

    def test_lln_diag(self):
        what = "time of lln-diag over lln, fp32, D = Dv = 64, {}, forward"
        self.assertEqual(self.cells(ratio(1.7))[what.format("causal")].verdict, "ok")
        self.assertEqual(self.cells(ratio(1.71))[what.format("causal")].verdict, "below")
        self.assertEqual(self.cells(ratio(2.3, "full"))[what.format("full")].verdict, "ok")

    def test_programs_with_as_many_threads_share_a_column(self):
        files = [
            results.load(self.file("a.json", [*probes(), moments_row()], threads="2")),
            results.load(self.file("b.json", [*probes(), features_row(0.5)])),
            results.load(self.file("c.json", [*probes(fma=50), ratio(1.5)])),
        ]
        columns = lln.merged(files)
        self.assertEqual([file.threads for file in columns], [1, 2])
        self.assertEqual(len(columns[0].of("features") + columns[0].of("lln_diag_over_lln")), 2)
        self.assertEqual(columns[0].rows["probes/begin"]["fma_f32_GFLOP/s"], 100)  # of the file that describes it


class Documents(LlnTest):
    def times(self):
        return self.file("times.json", [*probes(), moments_row(), features_row(0.4), ratio(1.5)])

    def test_printed(self):
        status, out, err = self.run_main(lln, *self.studies(), self.times())
        self.assertEqual((status, err), (0, ""))
        self.assertIn("3 bars measured: 3 hold, 0 below, 0 disturbed", out)
        self.assertIn("| 1.8 | 10.5 | 11.36 |", out)

    def test_one_file_is_enough_to_print(self):
        for path in (*self.studies(), self.times(), self.study("diagnose", diagnose(real=False), "d.json")):
            status, out, err = self.run_main(lln, path)
            self.assertEqual((status, err), (0, ""), path)
            self.assertTrue(out.strip())

    def test_written(self):
        (self.folder / "docs").mkdir()
        page = self.folder / "docs/lln.md"
        empty = "".join(f"<!-- lln {mark} -->\n<!-- end of lln {mark} -->\n" for mark in (*MARKS, "times"))
        page.write_text(f"begin\n{empty}end\n")
        arguments = (*self.studies(), self.times(), "--write-docs", "--root", self.folder)
        for _ in range(2):  # the second time changes nothing
            status, _, err = self.run_main(lln, *arguments)
            self.assertEqual((status, err), (0, ""))
        text = page.read_text()
        self.assertTrue(text.startswith("begin\n") and text.endswith("end\n"))
        for part in ("| 1.8 | 10.5 | 11.36 |", "| softmax attention is log-normal |", "bytes/s of moments over the"):
            self.assertEqual(text.count(part), 1, part)
        drawn = sorted(path.name for path in (self.folder / "docs/plots").iterdir())
        names = ("histograms", "lines", "matching", "real", "softmax", "split", "temperature", "variance")
        self.assertEqual(drawn, [f"lln_{name}.svg" for name in names])
        for name in drawn:
            ElementTree.parse(self.folder / "docs/plots" / name)
        page.write_text("no marks\n")
        status, _, err = self.run_main(lln, *arguments)
        self.assertEqual(status, 2)
        self.assert_one_line(err, "lln.md", "<!-- lln claims -->")

    def test_documents_need_all_files(self):
        one, two = self.studies()
        without = self.study("diagnose", diagnose(real=False), "d.json")
        for files in ((one, self.times()), (two, self.times()), (one, two), (one, without, self.times())):
            status, _, err = self.run_main(lln, *files, "--write-docs", "--root", self.folder)
            self.assertEqual(status, 2)
            self.assert_one_line(err, "--write-docs needs both studies")

    def test_page_of_the_project_has_the_marks_and_names_the_charts(self):
        text = (lln.bars.ROOT / "docs/lln.md").read_text(encoding="utf-8")
        for mark in (*MARKS, "times"):
            self.assertEqual(text.count(f"<!-- lln {mark} -->\n"), 1, mark)
        for path in self.studies():
            for name in lln.charts_of(lln.load(path)):
                self.assertEqual(text.count(f"plots/{name}"), 1, name)

    def test_unusable_files(self):
        lacking = copy.deepcopy(moments())
        del lacking["softmax"]["within"]
        shorter = copy.deepcopy(moments())
        shorter["matching"]["numerator_error"] = [[]]
        reports = self.folder / "r.json"
        reports.write_text(json.dumps({"linattn": "0.1.0", "command": "moments", "groups": []}))
        for path, part in (
            (self.study("moments", lacking, "l.json"), "softmax/within"),
            (self.study("moments", shorter, "s.json"), "other extents"),
            (self.file("b.json", []), "no file is a study"),
            (self.file("c.json", [row("features/features/lln/f32/full/B1/H1/N65536/D64/Dv64", 1)]), "eff"),
            (reports, "not a study"),
            (self.folder / "none.json", "none.json"),
        ):
            status, _, err = self.run_main(lln, path)
            self.assertEqual(status, 2, path)
            self.assert_one_line(err, part)
        status, _, err = self.run_main(plot, self.study("moments", shorter), "-o", self.folder / "out.svg")
        self.assertEqual(status, 2)
        self.assert_one_line(err, "other extents")

    def test_help_names_the_options(self):
        status, out, _ = self.run_main(lln, "--help")
        self.assertEqual(status, 0)
        self.assertIn("--write-docs", out)


class Charts(LlnTest):
    def texts(self, *files):
        out = self.folder / "out.svg"
        status, _, err = self.run_main(plot, *files, "-o", out)
        self.assertEqual((status, err), (0, ""))
        return [element.text for element in ElementTree.parse(out).getroot().iter("{http://www.w3.org/2000/svg}text")]

    def test_plot_takes_studies(self):
        texts = self.texts(*self.studies())
        for title in (
            "The same over Prop. 3.1",
            "Numerator of LLN attention",
            "Entropy against temperature, N = 512, D = 64",
            "Biased part: the same keys",
            "After matching",
            "Matched LLN over softmax attention",
        ):
            self.assertIn(title, texts)

    def test_plot_takes_a_study_without_real_heads(self):
        texts = self.texts(self.study("diagnose", diagnose(real=False)))
        self.assertNotIn("Matched LLN over softmax attention", texts)
        self.assertIn("linattn diagnose --study, 2 draws, seed 0", texts)


if __name__ == "__main__":
    unittest.main()
