# SPDX-License-Identifier: BSD-3-Clause

import os
import subprocess
import tempfile
import unittest

from support import ROOT


def run(*command, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("LINATTN_")}
    done = subprocess.run(
        [str(ROOT / command[0]), *command[1:]],
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    return done.returncode, done.stdout, done.stderr


class Scripts(unittest.TestCase):
    def test_gpu_check_explains_itself(self):
        status, out, err = run("scripts/gpu-check", "--dry-run", LINATTN_CUDA_ARCH="AMPERE80")
        self.assertEqual((status, err), (0, ""))
        for part in (
            "-DKokkos_ARCH_AMPERE80=ON",
            "gpu_check check",
            "gpu_check bench",
            "missing: a source folder of Kokkos",
        ):
            self.assertIn(part, out)

    def test_gpu_check_says_in_one_line_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            status, out, err = run("scripts/gpu-check", folder)
        self.assertEqual((status, out), (2, ""))
        self.assertEqual(err.count("\n"), 1)
        self.assertIn("has no bin/nvcc_wrapper", err)

    def test_wrong_options(self):
        for command in (
            ("scripts/gpu-check", "--fast"),
            ("scripts/bench", "--fast"),
            ("scripts/bench", "--quick", "--write-docs"),
            ("scripts/bench", "--affine", "--quick", "--write-docs"),
            ("scripts/bench", "--lln", "--quick", "--write-docs"),
            ("scripts/bench", "--comparison", "--quick", "--write-docs"),
            ("scripts/bench", "--affine", "--lln"),
            ("scripts/bench", "--lln", "--comparison"),
            ("scripts/bench", "--comparison", "--affine"),
            ("scripts/bench", "--affine", "--lln", "--comparison"),
        ):
            status, out, err = run(*command)
            self.assertEqual((status, out), (2, ""), command)
            self.assertEqual(err.count("\n"), 1)

    def test_bench_names_its_options(self):
        err = run("scripts/bench", "--help")[2]
        for option in ("--affine", "--lln", "--comparison", "--quick", "--write-docs"):
            self.assertIn(option, err)


if __name__ == "__main__":
    unittest.main()
