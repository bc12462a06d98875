# SPDX-License-Identifier: BSD-3-Clause

import unittest

from support import ScriptTest, probes, row, timed

import bars
import results


def main_row(passes, variant, scalar, d, eff, **counters):
    return timed(f"main/{passes}/{variant}/{scalar}/causal/B1/H8/N4096/D{d}/Dv{d}", 2, eff, **counters)


def memory(saved=4, workspace=100, states=1000, measured=(0, 0)):
    return row(
        "memory/forward/elu/f32/causal/B1/H8/N100/D64/Dv64",
        1,
        tokens_N=1e6,
        tokens_2N=2e6,
        number_bytes=4,
        saved_N=1e6 * saved,
        saved_2N=2e6 * saved,
        workspace_N=workspace,
        workspace_2N=workspace,
        states_N=states,
        states_2N=states,
        measured_N=measured[0],
        measured_2N=measured[1],
    )


class Bars(ScriptTest):
    def lines(self, *rows, **context):
        file = results.load(self.file("a.json", [*probes(), *rows], **context))
        return {line.what: line.cells[0] for line in bars.host_lines([file])}

    def test_eff_at_and_below_the_bar(self):
        lines = self.lines(
            main_row("forward", "relu", "f32", 64, 0.60),
            main_row("forward", "relu", "f32", 128, 0.59),
            main_row("backward", "elu", "f64", 64, 0.45),
            main_row("forward", "elu", "f32", 64, 0.3, disturbed=1),
        )
        self.assertEqual(lines["eff, relu, fp32, D = Dv = 64, forward"].verdict, "ok")
        self.assertEqual(lines["eff, relu, fp32, D = Dv = 128, forward"].verdict, "below")
        self.assertEqual(lines["eff, elu, fp64, D = Dv = 64, backward"].verdict, "ok")
        self.assertEqual(lines["eff, elu, fp32, D = Dv = 64, forward"].verdict, "disturbed")
        self.assertEqual(lines["eff, relu, fp64, D = Dv = 64, forward"].verdict, "missing")

    def test_local_blocks_have_a_bar_for_each_mask(self):
        cases = ("causal", 1.7, "ok"), ("causal", 1.8, "below"), ("full", 1.8, "ok"), ("full", 2.4, "below")
        for mask, ratio, verdict in cases:
            name = f"lln_diag_over_lln/backward/lln/f32/{mask}/B1/H8/N4096/D64/Dv64"
            lines = self.lines(row(name, 1, ratio=ratio))
            self.assertEqual(lines[f"time of lln-diag over lln, fp32, D = Dv = 64, {mask}, backward"].verdict, verdict)

    def test_few_heads_is_a_throughput(self):
        name = "few_heads/forward/relu/f32/causal/B1/H8/N8192/D64/Dv64"
        what = "throughput of B H = 1, N = 65,536 over that of many heads, relu, forward"
        for ratio, verdict in ((1.2, "ok"), (1.3, "below")):
            self.assertEqual(self.lines(row(name, 1, ratio=ratio), threads="2")[what].verdict, verdict)
        self.assertEqual(self.lines(row(name, 1, ratio=2))[what].verdict, "missing")  # no matter for one thread

    def test_jumps_go_both_ways(self):
        def at(d, rate):
            return timed(f"d_sweep/forward/relu/f32/causal/B1/H2/N1024/D{d}/Dv{d}", 1, 0.5, **{"GFLOP/s": rate})

        what = "time of a FLOP, largest jump between D = 16, 32, ..., 512, forward"
        self.assertEqual(self.lines(at(16, 50), at(32, 90), at(48, 100))[what].text, "1.80 (16 to 32)")
        for rates in ((50, 110, 110), (110, 110, 50)):
            cell = self.lines(*(at(16 * (i + 1), rate) for i, rate in enumerate(rates)))[what]
            self.assertEqual((cell.verdict, cell.text[:4]), ("below", "2.20"))
        next_n = "next_n/forward/relu/f32/causal/B1/H2/N{0}/D64/Dv64"
        cell = self.lines(row(next_n.format(16), 1, ratio=1.5), row(next_n.format(64), 1, ratio=0.4))[
            "time of a FLOP, largest jump between N and N + 1, forward"
        ]
        self.assertEqual((cell.verdict, cell.text), ("below", "2.50 (N = 64)"))

    def test_short_sequences_against_softmax_where_there_is_one(self):
        name = "short/forward/{0}/f32/causal/B1/H8/N{1}/D64/Dv64"
        what = "time over exact softmax attention, N <= 256, elu, forward"
        ours = [row(name.format("elu", n), 1) for n in (16, 64)]
        self.assertEqual(self.lines(*ours)[what].verdict, "missing")
        exact = [row(name.format("softmax", 16), 0.5), row(name.format("softmax", 64), 2)]
        cell = self.lines(*ours, *exact)[what]
        self.assertEqual((cell.verdict, cell.text), ("below", "2.00 (N = 16)"))

    def test_exact_attention_and_where_it_is_overtaken(self):
        name = "exact/{0}/softmax/f32/{1}/B1/H{2}/N{3}/D64/Dv64"
        lines = self.lines(
            row(name.format("forward", "full", 8, 2048), 1, eff=0.55),
            row(name.format("backward", "causal", 1, 4096), 1, eff=0.35),
            row("crossover/forward/elu/f32/causal/B1/H8/N192/D64/Dv64", 1, ratio=1.2),
            row("crossover/forward/lln/f32/causal/B1/H8/N320/D128/Dv128", 1, ratio=0.9),
        )
        self.assertEqual(str(lines["eff, exact attention, fp32, N = 2,048, D = Dv = 64, full, forward"]), "0.55 ok")
        self.assertEqual(str(lines["eff, exact attention, fp32, B H = 1, N = 4,096, D = Dv = 64, causal, backward"]), "0.35 below")
        self.assertEqual(str(lines["time of exact attention over elu, causal, N = 2 D + 64 = 192, forward"]), "1.20 ok")
        self.assertEqual(str(lines["time of exact attention over lln, causal, N = 2 D + 64 = 320, forward"]), "0.90 below")

    def test_memory(self):
        kept, query = (
            "numbers kept for each row, elu, fp32, forward",
            "temporaries over (a number a row + states), elu, fp32, forward",
        )
        growth = "growth of the process for each further row, in numbers, elu, fp32, forward"
        good = self.lines(memory())
        self.assertEqual([good[what].verdict for what in (kept, query, growth)], ["ok"] * 3)
        self.assertEqual(self.lines(memory(saved=8))[kept].verdict, "below")
        self.assertEqual(self.lines(memory(workspace=9e6))[query].verdict, "below")
        self.assertEqual(self.lines(memory(measured=(0, 64 * 4e6)))[growth].verdict, "below")
        self.assertEqual(self.lines(memory(measured=(-1, -1)))[growth].verdict, "missing")

    def test_a_missed_bar_is_counted_and_no_failure(self):
        one = self.file("1.json", [*probes(), main_row("forward", "relu", "f32", 64, 0.61)])
        two = self.file("2.json", [*probes(), main_row("forward", "relu", "f32", 64, 0.41)], threads="2")
        status, out, _ = self.run_main(bars, two, one)
        self.assertEqual(status, 0)
        self.assertRegex(out, r"relu, fp32, D = Dv = 64, forward +>= 0.60 +0.61 ok +0.41 below")
        self.assertIn("2 bars measured: 1 hold, 1 below, 0 disturbed", out)

    def test_gpu(self):
        gpu = self.file(
            "gpu.json",
            [*probes(), main_row("forward", "relu", "f32", 64, 0.36)],
            device="Some GPU",
            execution_space="Cuda",
        )
        status, out, _ = self.run_main(bars, gpu)
        self.assertEqual(status, 0)
        self.assertRegex(out, r"eff on a GPU.*forward +>= 0.35 +0.36 ok")

    def test_documents_are_filled_between_their_marks(self):
        (self.folder / "docs").mkdir()
        page, readme = self.folder / "docs/performance.md", self.folder / "README.md"
        page.write_text(
            "a\n<!-- bars -->\nstale words\n<!-- end of bars -->\nb\n<!-- results -->\n<!-- end of results -->\nc\n"
        )
        readme.write_text("x\n<!-- results -->\n<!-- end of results -->\ny\n")
        file = self.file("1.json", [*probes(), main_row("forward", "relu", "f32", 64, 0.61)])
        for _ in range(2):  # the second time changes nothing
            self.assertEqual(self.run_main(bars, file, "--write-docs", "--root", self.folder)[0], 0)
        text = page.read_text()
        self.assertNotIn("stale words", text)
        self.assertTrue(text.startswith("a\n<!-- bars -->\n") and text.endswith("<!-- end of results -->\nc\n"))
        self.assertIn("| eff, relu, fp32, D = Dv = 64, forward | >= 0.60 | 0.61 |", text)
        self.assertIn(
            "Some CPU, 512-bit vectors, GCC 12.2.0, Kokkos 3.4.1 (OpenMP), 1 thread, 2026-01-02", readme.read_text()
        )
        self.assertIn("| relu | 1, 8, 4096, 64 | 1.0 M | 0.61 |", readme.read_text())
        readme.write_text("no marks\n")
        status, _, err = self.run_main(bars, file, "--write-docs", "--root", self.folder)
        self.assertEqual(status, 2)
        self.assert_one_line(err, "README.md", "<!-- results -->")

    def test_unusable_files(self):
        for rows, part in (
            ([], "no file has rows"),
            ([row("main/forward/relu/f32/causal/B1/H8/N4096/D64/Dv64")], "eff"),
        ):
            status, _, err = self.run_main(bars, self.file("a.json", rows))
            self.assertEqual(status, 2)
            self.assert_one_line(err, part)


if __name__ == "__main__":
    unittest.main()
