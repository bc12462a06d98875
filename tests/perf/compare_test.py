# SPDX-License-Identifier: BSD-3-Clause

import unittest

from support import ScriptTest, probes, row, timed

import compare
import results

NAME = "main/forward/elu/f32/causal/B1/H8/N4096/D64/Dv64"


class Compare(ScriptTest):
    def status(self, old, new, *options, **context):
        a, b = self.file("old.json", [*probes(), *old]), self.file("new.json", [*probes(), *new], **context)
        return self.run_main(compare, a, b, *options)

    def test_equal_files_are_the_same(self):
        status, out, _ = self.status([timed(NAME, 2, 0.5)], [timed(NAME, 2, 0.5)])
        self.assertEqual(status, 0)
        self.assertIn("0 slower, 0 faster, 1 the same", out)

    def test_threshold_decides(self):
        for eff, options, expected in (
            (0.48, (), 0),
            (0.47, (), 1),
            (0.47, ("--threshold", "10%"), 0),
            (0.47, ("--threshold", "0.1"), 0),
            (0.495, ("--threshold", "2%"), 0),
            (0.6, (), 0),
        ):
            status, out, _ = self.status([timed(NAME, 2, 0.5)], [timed(NAME, 2, eff)], *options)
            self.assertEqual(status, expected, out)

    def test_change_within_the_spread_is_none(self):
        noisy = timed(NAME, 2, 0.4, spread=0.3)
        self.assertEqual(self.status([timed(NAME, 2, 0.5)], [noisy])[0], 0)

    def test_by_eff_or_time(self):
        # twice the time on a machine at half the speed
        slow = timed(NAME, 4, 0.5)
        self.assertEqual(self.status([timed(NAME, 2, 0.5)], [slow])[0], 0)
        self.assertEqual(self.status([timed(NAME, 2, 0.5)], [slow], "--by", "time")[0], 1)

    def test_rows_without_roofs_are_compared_by_time(self):
        status, out, _ = self.status([row("next_n/forward/elu", 2)], [row("next_n/forward/elu", 3)])
        self.assertEqual(status, 1)
        self.assertIn("1.500 by time", out)

    def test_disturbed_rows_take_no_part(self):
        for old, new in ((0, 1), (1, 0)):
            status, out, _ = self.status([timed(NAME, 2, 0.5, disturbed=old)], [timed(NAME, 9, 0.1, disturbed=new)])
            self.assertEqual(status, 0)
            self.assertIn("1 disturbed", out)

    def test_filter(self):
        old, new = [timed(NAME, 2, 0.5), timed("d_sweep/x", 2, 0.5)], [timed(NAME, 2, 0.1), timed("d_sweep/x", 2, 0.5)]
        self.assertEqual(self.status(old, new, "--filter", "d_sweep")[0], 0)
        self.assertEqual(self.status(old, new)[0], 1)

    def test_other_configuration_is_refused_unless_forced(self):
        for key, value in (("threads", "2"), ("cpu", "Other"), ("compiler", "GCC 13"), ("kokkos_version", "4.6.2")):
            status, _, err = self.status([timed(NAME, 2, 0.5)], [timed(NAME, 2, 0.5)], **{key: value})
            self.assertEqual(status, 2)
            self.assert_one_line(err, key, value, "--force")
            self.assertEqual(self.status([timed(NAME, 2, 0.5)], [timed(NAME, 2, 0.5)], "--force", **{key: value})[0], 0)

    def test_unsteady_probes_are_noted(self):
        a = self.file("a.json", [*probes(end=80), timed(NAME, 2, 0.5)])
        self.assertIn("fma_f32 drifted by 20%", self.run_main(compare, a, a)[1])
        smoke = self.file("smoke.json", [*probes(), timed(NAME, 2, 0.5)], seconds_a_row="0")
        self.assertIn("smoke test", self.run_main(compare, smoke, smoke)[1])
        b = self.file("b.json", [*probes(scaling=0.5), timed(NAME, 2, 0.5)])
        self.assertIn("0.50 of what one thread promises", self.run_main(compare, b, b)[1])

    def test_unusable_files(self):
        good = self.file("good.json", [timed(NAME, 2, 0.5)])
        (self.folder / "text.json").write_text("no")
        (self.folder / "list.json").write_text("[]")
        for path in ("missing.json", "text.json", "list.json"):
            status, _, err = self.run_main(compare, good, self.folder / path)
            self.assertEqual(status, 2)
            self.assert_one_line(err, path)
        other = self.file("other.json", [timed("main/other", 2, 0.5)])
        status, _, err = self.run_main(compare, good, other)
        self.assertEqual(status, 2)
        self.assert_one_line(err, "no row in common")

    def test_wrong_threshold(self):
        status, _, err = self.status([], [], "--threshold", "much")
        self.assertEqual(status, 2)
        self.assertIn("'much' is neither", err)


class Loading(ScriptTest):
    def test_names_units_and_parts(self):
        file = results.load(self.file("a.json", [row(NAME, 2.5, eff=0.5), {**row("x/y"), "error_occurred": True}]))
        self.assertEqual(list(file.rows), [NAME])
        r = file.rows[NAME]
        self.assertAlmostEqual(r.seconds, 2.5e-3)
        self.assertEqual((r.group, r.passes, r.variant, r.type, r.mask), ("main", "forward", "elu", "f32", "causal"))
        self.assertEqual(r.extents, {"B": 1, "H": 8, "N": 4096, "D": 64, "Dv": 64})
        self.assertEqual(r.tokens, 8 * 4096)
        self.assertEqual(r["eff"], 0.5)
        self.assertNotIn("cpu_time", r.counters)


if __name__ == "__main__":
    unittest.main()
