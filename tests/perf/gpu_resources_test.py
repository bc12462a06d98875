# SPDX-License-Identifier: BSD-3-Clause

import unittest

from support import ScriptTest

import gpu_resources

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_first' for 'sm_90'
ptxas info    : Function properties for _first
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 120 registers, used 1 barriers, 560 bytes cmem[0]
ptxas info    : Compiling entry function '_other' for 'sm_90'
ptxas info    : Function properties for _other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, 360 bytes cmem[0]
"""


class Resources(ScriptTest):
    def test_reads_what_the_compiler_says(self):
        self.assertEqual(list(gpu_resources.entries(LOG)), [("_first", 120, 16, 8, 4), ("_other", 30, 0, 0, 0)])

    def test_names_kernels(self):
        walk = "void f<LinAttn::detail::WalkKernel<Kokkos::Cuda, (LinAttn::detail::Walk)2, float, LinAttn::ExponentialMap, LinAttn::ExponentialMap> >()"
        self.assertEqual(gpu_resources.described(walk), ("query_gradient", "ExponentialMap", "float"))
        scan = "void f<LinAttn::detail::ScanStates<Kokkos::Cuda, double, true> >()"
        self.assertEqual(gpu_resources.described(scan), ("ScanStates", "", "double"))
        self.assertIsNone(gpu_resources.described("void Kokkos::fill<float>()"))

    def test_counts_spills(self):
        kernel = "void f<LinAttn::detail::WalkKernel<Kokkos::Cuda, (LinAttn::detail::Walk)1, float, LinAttn::ReluMap, LinAttn::ReluMap> >()"
        real = gpu_resources.demangled
        gpu_resources.demangled = lambda names: [kernel, "void other()"]
        try:
            self.assertEqual(gpu_resources.kernels(LOG), [gpu_resources.Kernel("output", "ReluMap", "float", 120, 16, 8, 4)])
        finally:
            gpu_resources.demangled = real


if __name__ == "__main__":
    unittest.main()
