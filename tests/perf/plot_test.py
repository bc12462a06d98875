# SPDX-License-Identifier: BSD-3-Clause

import math
import unittest
from xml.etree import ElementTree

from support import ScriptTest, row, timed

import plot
import svg

SVG = "{http://www.w3.org/2000/svg}"


def main_rows():
    return [
        timed(f"main/{p}/{v}/f32/causal/B1/H8/N4096/D{d}/Dv{d}", 2, 0.5)
        for p in ("forward", "backward")
        for v in ("relu", "elu")
        for d in (64, 128)
    ]


def sweep(group, extent, values, **counters):
    at = {"B": 1, "H": 2, "N": 1024, "D": 64}
    rows = []
    for p in ("forward", "backward"):
        for value in values:
            e = {**at, extent: value}
            name = f"{group}/{p}/elu/f32/causal/B{e['B']}/H{e['H']}/N{e['N']}/D{e['D']}/Dv{e['D']}"
            rows.append(timed(name, 0.001 * value, 0.4, workspace_bytes=1000.0, saved_bytes=4.0 * value, **counters))
    return rows


class Plot(ScriptTest):
    def draw(self, *files):
        out = self.folder / "out.svg"
        status, text, err = self.run_main(plot, *files, "-o", out)
        return status, err, ElementTree.parse(out).getroot() if out.exists() else None

    def texts(self, root):
        return [element.text for element in root.iter(SVG + "text")]

    def test_all_charts(self):
        file = self.file(
            "a.json", main_rows() + sweep("d_sweep", "D", (16, 32, 48)) + sweep("n_sweep", "N", (1, 2, 4096, 131072))
        )
        status, err, root = self.draw(file)
        self.assertEqual((status, err), (0, ""))
        texts = self.texts(root)
        for title in (
            "eff in fp32, causal",
            "eff against D = Dv",
            "Time of a token against N",
            "Memory beside inputs and outputs",
        ):
            self.assertIn(title, texts)
        self.assertIn("128k", texts)
        self.assertTrue(any("Some CPU" in (text or "") for text in texts))
        self.assertGreater(len(list(root.iter(SVG + "polyline"))), 5)

    def test_two_files_are_told_apart(self):
        one = self.file("one.json", sweep("n_sweep", "N", (64, 128)))
        two = self.file("two.json", sweep("n_sweep", "N", (64, 128)), threads="2")
        texts = self.texts(self.draw(one, two)[2])
        self.assertIn("forward, 1 thread", texts)
        self.assertIn("forward, 2 threads", texts)

    def test_peers_beside_ours(self):
        ours = self.file("ours.json", sweep("n_sweep", "N", (64, 128)))
        name = "n_sweep/forward/elu_chunked/f32/causal/B1/H2/N{0}/D64/Dv64"
        peers = self.file(
            "peers.json", [row(name.format(n), 1, peak_bytes=2e6) for n in (64, 128)], library="PyTorch 2"
        )
        status, err, root = self.draw(ours, peers)
        self.assertEqual((status, err), (0, ""))
        self.assertTrue(any("elu_chunked" in (text or "") and "PyTorch 2" in text for text in self.texts(root)))

    def test_disturbed_rows_are_left_out(self):
        file = self.file("a.json", sweep("n_sweep", "N", (64, 128), disturbed=1))
        self.assertEqual(self.draw(file)[0], 2)

    def test_markup_in_the_data_is_escaped(self):
        file = self.file("a.json", sweep("n_sweep", "N", (64, 128)), cpu='<b> & "c"')
        self.assertTrue(any("<b> &" in (text or "") for text in self.texts(self.draw(file)[2])))

    def test_nothing_to_draw_and_nowhere_to_write(self):
        empty = self.file("a.json", [])
        status, err, root = self.draw(empty)
        self.assertEqual((status, root), (2, None))
        self.assert_one_line(err, "no rows")
        file = self.file("b.json", main_rows())
        status, _, err = self.run_main(plot, file, "-o", self.folder / "none" / "out.svg")
        self.assertEqual(status, 2)
        self.assert_one_line(err, "out.svg")


class Svg(unittest.TestCase):
    def test_numbers(self):
        for value, text in (
            (0, "0"),
            (1, "1"),
            (512, "512"),
            (1024, "1k"),
            (131072, "128k"),
            (2**20, "1M"),
            (0.05, "0.05"),
            (1500, "1500"),
            (25000, "25k"),
            (3e6, "3M"),
            (2e9, "2G"),
        ):
            self.assertEqual(svg.number(value), text)

    def test_ticks_lie_in_the_range_and_are_named(self):
        for axis, low, high in (
            (svg.Axis("", log=10), 0.3, 7e5),
            (svg.Axis("", log=2), 1, 131072),
            (svg.Axis(""), 0, 0.83),
            (svg.Axis("", log=10), 2.0, 7.0),
            (svg.Axis("", log=10), 6.1e5, 7.9e5),
            (svg.Axis("", log=2), 5, 7),
            (svg.Axis(""), 0, 1e-6),
        ):
            ticks = svg.ticks(axis, low, high)
            self.assertTrue(all(low * 0.999 <= v <= high * 1.001 for v, _ in ticks), ticks)
            named = [text for _, text in ticks if text]
            self.assertGreaterEqual(len(named), 2, ticks)
            self.assertLessEqual(len(named), 12, ticks)
            self.assertEqual(len(named), len(set(named)))

    def test_what_a_logarithm_cannot_show_is_left_out(self):
        chart = svg.Chart("t", svg.Axis("x", log=2), svg.Axis("y", log=10))
        chart.line("a", [0, 1, 2, 4], [1, 0, math.nan, 3])
        self.assertEqual((chart.series[0].xs, chart.series[0].ys), ([4], [3]))
        ElementTree.fromstring(svg.figure([chart]))

    def test_lines_without_markers_and_bars_of_errors(self):
        chart = svg.Chart("t", svg.Axis("x"), svg.Axis("y", low=0, high=4))
        chart.line("theory", [0, 1], [1, 2], marked=False)
        chart.line("measured", [0, 1, 2], [1, 2, math.nan], errors=[0.5, 9, 1])
        root = ElementTree.fromstring(svg.figure([chart]))
        bars = [e for e in root.iter(SVG + "line") if e.get("stroke-opacity")]
        self.assertEqual(len(bars), 2)
        frame = next(e for e in root.iter(SVG + "rect") if e.get("class") == "frame")
        top, bottom = float(frame.get("y")), float(frame.get("y")) + float(frame.get("height"))
        for bar in bars:  # one that is too long ends at the frame
            for end in ("y1", "y2"):
                self.assertTrue(top - 0.1 <= float(bar.get(end)) <= bottom + 0.1)
        self.assertEqual(len([e for e in root.iter(SVG + "rect") if e.get("fill") == svg.COLOURS[1]]), 3)
        self.assertEqual(list(root.iter(SVG + "circle")), [])

    def test_single_point_constant_and_empty_charts(self):
        for xs, ys in (([1], [1]), ([1, 2], [5, 5]), ([0, 1], [0, 0]), ([], [])):
            chart = svg.Chart("t", svg.Axis("x"), svg.Axis("y"))
            chart.line("a", xs, ys)
            chart.level(1, "one")
            ElementTree.fromstring(svg.figure([chart, chart, chart], columns=2, caption="c"))


if __name__ == "__main__":
    unittest.main()
