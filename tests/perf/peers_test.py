# SPDX-License-Identifier: BSD-3-Clause

import argparse
import unittest
from unittest import mock

from support import ScriptTest, timed

import peers
import results


class Peers(ScriptTest):
    def test_without_torch_one_line_says_so(self):
        with mock.patch.object(peers.importlib.util, "find_spec", return_value=None):
            status, _, err = self.run_main(peers)
        self.assertEqual(status, 2)
        self.assert_one_line(err, "PyTorch is not installed")

    def test_results_have_the_names_of_ours(self):
        found = {
            "seconds": 2e-3,
            "best_s": 1e-3,
            "spread": 0.0,
            "samples": 3,
            "peak_bytes": 5,
            "torch": "2.0",
            "gpu": "",
        }
        out = self.folder / "peers.json"
        ours = self.file(
            "ours.json",
            [timed(f"main/{p}/elu/f32/causal/B1/H8/N4096/D64/Dv64", 1, 0.5) for p in ("forward", "backward")],
        )
        with mock.patch.object(peers.importlib.util, "find_spec", return_value=True), mock.patch.object(
            peers, "run_case", side_effect=lambda case: (dict(found), "")
        ):
            status, text, err = self.run_main(
                peers, "--quick", "--threads", 1, "-o", out, "--against", ours, "--methods", "chunked,softmax"
            )
        self.assertEqual((status, err), (0, ""))
        file = results.load(out)
        self.assertEqual(file.context["library"], "PyTorch 2.0")
        self.assertEqual({row.variant for row in file.rows.values()}, {"elu_chunked", "softmax"})
        self.assertEqual({row.passes for row in file.rows.values()}, {"forward", "forward_backward"})
        self.assertRegex(text, r"chunked +forward +H8/N4096/D64 +2.000 +0.0 +2.0")  # 2 ms over 1 ms
        self.assertRegex(text, r"chunked +forward_backward +H8/N4096/D64 +2.000 +0.0 +1.0")  # over 1 ms + 1 ms

    def test_training_has_the_rows_of_our_memory(self):
        found = {"tokens": 8192, "element_bytes": 4, "fits": 1, "kept_hooks": 2e8, "torch": "2.0", "gpu": ""}
        out = self.folder / "training.json"
        with mock.patch.object(peers.importlib.util, "find_spec", return_value=True), mock.patch.object(
            peers, "run_case", side_effect=lambda case: (dict(found), "")
        ):
            status, text, err = self.run_main(peers, "--training", "--quick", "--threads", 1, "-o", out)
        self.assertEqual((status, err), (0, ""))
        rows = results.load(out).of("memory", variant="affine_cumsum", passes="forward_backward")
        self.assertEqual({row.extents["D"] for row in rows}, {32, 64, 128})
        self.assertEqual(rows[0]["kept_hooks"], 2e8)
        self.assertIn("cumsum H8/N1024/D32", text)

    def test_wrong_options(self):
        with mock.patch.object(peers.importlib.util, "find_spec", return_value=True):
            status, _, err = self.run_main(peers, "--methods", "magic")
        self.assertEqual(status, 2)
        self.assert_one_line(err, "magic")
        self.assertEqual(peers.size("4G"), 4 * 2**30)
        self.assertRaises(argparse.ArgumentTypeError, peers.size, "much")


if __name__ == "__main__":
    unittest.main()
