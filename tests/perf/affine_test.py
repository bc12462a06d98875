# SPDX-License-Identifier: BSD-3-Clause

import unittest
from xml.etree import ElementTree

from support import ScriptTest, probes, row, timed

import affine
import results


def name(group, passes="forward", variant="affine", scalar="f32", mask="causal", **extents):
    e = {"B": 1, "H": 8, "N": 4096, "D": 64, **extents}
    return f"{group}/{passes}/{variant}/{scalar}/{mask}/B{e['B']}/H{e['H']}/N{e['N']}/D{e['D']}/Dv{e['D']}"


def ratio(group, passes, d, value, disturbed=0):
    return row(name(group, passes, D=d), 1, ratio=value, first=1e-7, second=value * 1e-7, disturbed=disturbed)


def pair(group, forward=2.0, backward=6.0, label="", **parts):
    found = [timed(name(group, p, **parts), t, 0.5) for p, t in (("forward", forward), ("backward", backward))]
    return [{**entry, "label": label} for entry in found]


def memory(n, d=64, variant="affine", kept=4, temporaries=0.0, fits=1, group="memory", **extents):
    tokens = 8 * n
    if group == "layer":
        tokens = extents["H"] * n
    counters = {"tokens": tokens, "number_bytes": 4, "element_bytes": 4, "fits": fits, "kept_model": tokens * kept}
    if fits:
        counters |= {"tensors_hooks": 16 * d * tokens, "gradients_hooks": 16 * d * tokens}
        counters |= {"saved_process": -1, "transient_process": 16 * d * tokens + 5000}
        for what, value in (("kept", kept * tokens), ("forward", 1e5), ("backward", 2e5 + temporaries * tokens)):
            counters |= {f"{what}_hooks": value, f"{what}_process": value}
    return row(name(group, "forward_backward", variant, N=n, D=d, **extents), 1, **counters)


class Tables(ScriptTest):
    def load(self, *rows, **context):
        return results.load(self.file("a.json", [*probes(), *rows], **context))

    def test_bars(self):
        file = self.load(
            ratio("affine_over_elu", "forward", 64, 1.10),
            ratio("affine_over_elu", "backward", 64, 1.11),
            ratio("dropout_ratio", "forward", 64, 1.6, disturbed=1),
            ratio("dropout_ratio", "backward", 64, 1.5),
            ratio("dropout_ratio", "forward", 128, 9),
        )
        cells = {line.what: line.cells[0] for line in affine.bar_lines([file])}
        self.assertEqual(cells["time of affine (l2) over elu, fp32, D = Dv = 64, forward"].verdict, "ok")
        self.assertEqual(cells["time of affine (l2) over elu, fp32, D = Dv = 64, backward"].verdict, "below")
        self.assertEqual(cells["time of affine (none) over elu, fp32, D = Dv = 64, forward"].verdict, "missing")
        dropout = "time with dropout over without, fp32, D = Dv = {0}, {1}"
        self.assertEqual(cells[dropout.format(64, "forward")].verdict, "disturbed")
        self.assertEqual(cells[dropout.format(64, "backward")].verdict, "ok")
        self.assertEqual(cells[dropout.format(128, "forward")].verdict, "shown")

    def test_both_is_the_sum_and_the_whole_problem_is_named(self):
        label = "for B=4 H=16 Hkv=16 Nq=4096 Nk=4096 D=64 Dv=64"
        table = affine.times_markdown(self.load(*pair("heads", label=label), *pair("heads", N=100)), "heads")
        self.assertIn("| affine, fp32, causal | 1, 8, 4096, 64 [4, 16] | 2 ms | 6 ms | 8 ms | 4.1 M | 0.50 |", table)
        self.assertIn("| 1, 8, 100, 64 |", table)
        alone = self.load(timed(name("heads"), 1, 0.5))
        self.assertEqual(affine.times_markdown(alone, "heads"), "")

    def test_masks_are_told_apart(self):
        table = affine.times_markdown(self.load(*pair("main"), *pair("main", mask="full")), "main")
        self.assertEqual(table.count("1, 8, 4096, 64"), 2)

    def test_slopes(self):
        rows = [memory(n, temporaries=0.5) for n in (1024, 2048, 4096)]
        rows += [memory(n, variant="affine_states", kept=16644, fits=int(n < 4096)) for n in (1024, 2048, 4096)]
        file = self.load(*rows)
        table = affine.slopes_markdown([file], "memory")
        affine_line = "| affine, fp32 | 64 | 1024 | 4.00 | 4.0 | 0.00 | 0.0 | 0.50 | 0.5 | 100 kB | 216 kB (N = 4,096) |"
        self.assertIn(affine_line, table)
        self.assertIn("| a state a token, C++, fp32 | 64 | 1024 | 16644.00 |", table)
        self.assertIn("(N = 2,048)", table)  # the longest that fits
        kept = affine.kept_markdown([file])
        self.assertIn("| affine, fp32 | 64 | 32.8 kB | 65.5 kB | 131 kB |", kept)
        self.assertIn("| 136 MB | 273 MB | does not fit (545 MB) |", kept)

    def test_unknown_growth_of_the_process(self):
        rows = [memory(n) for n in (1024, 2048)]
        for entry in rows:
            entry["kept_process"] = -1
        self.assertIn("| 4.00 | - | 0.00 |", affine.slopes_markdown([self.load(*rows)], "memory"))

    def test_bars_of_memory(self):
        def verdicts(**parts):
            lines = affine.memory_lines(self.load(*(memory(n, **parts) for n in (1024, 2048))))
            return [line.cells[0].verdict for line in lines]

        self.assertEqual(verdicts(), ["ok", "ok", "ok"])
        self.assertEqual(verdicts(kept=8), ["below", "ok", "ok"])
        self.assertEqual(verdicts(temporaries=5), ["ok", "ok", "below"])
        self.assertEqual(verdicts(variant="affine_center_v", kept=260), ["shown", "ok", "ok"])
        self.assertEqual(verdicts(variant="affine_states", kept=9999), [])

    def test_models(self):
        """The authors' numbers, as they published them."""
        by_name = {model.name: model for model in affine.MODELS}
        llama, pythia = by_name["Llama-3.2-1B"], by_name["Pythia-1.4B"]
        self.assertEqual([f"{x / 1e9:.1f}" for x in (llama.weights, llama.activations)], ["14.8", "8.1"])
        self.assertEqual([f"{x / 1e9:.1f}" for x in (pythia.weights, pythia.activations)], ["17.0", "24.2"])
        self.assertEqual(llama.saved, 32 * 4096 * (4 * 4 * 64 + 4))
        table = affine.models_markdown([self.load(memory(4096, group="layer", H=32))])
        self.assertIn(
            "| Llama-3.2-1B, N = 4,096 | 14.8 GB | 8.05 GB | 503 MB | 135 MB | 135 MB | 134 MB | 134 MB, 134 MB |", table
        )
        self.assertIn("| TinyLlama, N = 2,048 | 13.2 GB | 5.54 GB | 252 MB | 67.4 MB | - | 67.1 MB | - |", table)

    def test_offsets(self):
        errors = {"error_plain": 1e-3, "error_center_v": 2e-5, "error_centred": 3e-7}
        file = self.load(*(row(name("offsets", "backward") + f"/V{v}", 1, **errors) for v in (1000, 0)))
        table = affine.offsets_markdown([file])
        self.assertIn("| 1,000 | 1.0e-03 | 2.0e-05 | 3.0e-07 |", table)
        self.assertLess(table.index("| 0 |"), table.index("| 1,000 |"))


class Documents(ScriptTest):
    def files(self):
        times = [ratio("dropout_ratio", p, d, 1.2) for p in ("forward", "backward") for d in (32, 64)]
        times += pair("main") + pair("dropout") + pair("vision", mask="full")
        for n in (1024, 2048):
            times += pair("n_sweep", N=n, D=32)
        for d in (16, 32):
            times += pair("d_sweep", N=8192, D=d)
        held = [memory(n, d) for d in (32, 64) for n in (1024, 2048)]
        held += [memory(n, variant="affine_states", kept=16644, fits=int(n < 2048)) for n in (1024, 2048)]
        one = self.file("affine-1.json", [*probes(), *times])
        two = self.file("affine-2.json", [*probes(), *times], threads="2")
        return [two, one, self.file("memory-2.json", [*probes(), *held], threads="2")]

    def test_printed(self):
        status, out, err = self.run_main(affine, *self.files())
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"dropout over without, fp32, D = Dv = 64, forward +<= 1.50 +1.20 ok +1.20 ok")
        self.assertIn("10 bars measured: 10 hold, 0 below, 0 disturbed", out)
        self.assertIn("| affine, fp32 | 32 | 512 | 4.00 |", out)

    def test_written(self):
        (self.folder / "docs").mkdir()
        page = self.folder / "docs/affine.md"
        marks = ("bars", "times", "offsets", "memory", "models")
        empty = "".join(f"<!-- affine {mark} -->\n<!-- end of affine {mark} -->\n" for mark in marks)
        page.write_text(f"begin\n{empty}end\n")
        for _ in range(2):  # the second time changes nothing
            status, _, err = self.run_main(affine, *self.files(), "--write-docs", "--root", self.folder)
            self.assertEqual((status, err), (0, ""))
        text = page.read_text()
        self.assertTrue(text.startswith("begin\n") and text.endswith("end\n"))
        for part in ("does not fit (273 MB)", "| time with dropout over without, fp32, D = Dv = 64, forward |"):
            self.assertEqual(text.count(part), 1, part)
        self.assertIn("Beside elu, 2 threads:", text)
        for plot in ("affine_time", "affine_dropout", "affine_memory"):
            ElementTree.parse(self.folder / "docs/plots" / f"{plot}.svg")
        page.write_text("no marks\n")
        status, _, err = self.run_main(affine, *self.files(), "--write-docs", "--root", self.folder)
        self.assertEqual(status, 2)
        self.assert_one_line(err, "affine.md", "<!-- affine bars -->")

    def test_unusable_files(self):
        only_times = self.file("t.json", [*probes(), *pair("main")])
        for arguments, part in (
            ((self.file("a.json", []),), "no file has rows"),
            ((only_times, "--write-docs", "--root", self.folder), "perf/memory"),
            ((self.file("b.json", [row(name("dropout_ratio"), 1)]),), "ratio"),
        ):
            status, _, err = self.run_main(affine, *arguments)
            self.assertEqual(status, 2)
            self.assert_one_line(err, part)

    def test_help_names_the_options(self):
        status, out, _ = self.run_main(affine, "--help")
        self.assertEqual(status, 0)
        self.assertIn("--write-docs", out)


if __name__ == "__main__":
    unittest.main()
