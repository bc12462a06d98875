# SPDX-License-Identifier: BSD-3-Clause
import numpy as np

shape = (2, 4, 6)
fill = lambda d: 0.25 * (5 * np.arange(np.prod(shape) * d) % 9).reshape(*shape, d) - 1
phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
q, k, v = fill(5), fill(5), fill(3)
w = np.tril(phi(q) @ phi(k).swapaxes(2, 3))
s = w.sum(3, keepdims=True)
o = w / s @ v
# L = |o|^2 / 2, so that dL/do = o
d_w = np.tril(o @ v.swapaxes(2, 3) - (o * o).sum(3, keepdims=True)) / s
d_q = d_w @ phi(k) * np.where(q > 0, 1, phi(q))
print(f"{o[1, 2, 3, 1]:.6f} {d_q[1, 2, 3, 1]:.6f}")
