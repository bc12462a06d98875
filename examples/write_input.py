# SPDX-License-Identifier: BSD-3-Clause
import h5py
import numpy as np

rng = np.random.default_rng(1)
with h5py.File("in.h5", "w") as file:
    file.attrs["schema"] = "linattn-1"
    file.attrs["variant"] = "elu"
    file.create_group("config").attrs["causal"] = 1
    file["inputs/q"] = rng.standard_normal((2, 8, 100, 32))
    file["inputs/k"] = rng.standard_normal((2, 2, 100, 32))
    file["inputs/v"] = rng.standard_normal((2, 2, 100, 16))
    file["cotangent/o"] = rng.standard_normal((2, 8, 100, 16))
