#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the fixtures: inputs, expected outputs and expected gradients of linear attention.

This is an oracle, so it shares no formula with the library. There is no chunk, no scan and no
running state: every head materialises its Nq x Nk weights, and lln works on the logarithms

    log w_ij = log sum_d exp(alpha q_id + beta k_jd).

With W_ij the weights of the visible pairs (lln: divided by exp(c_i), which cancels), s_i their row
sums and g_i the cotangent of o_i,

    o_i        = sum_j W_ij v_j / s_i                     (normalised; 0 where s_i is 0)
    dL/dW_ij   = g_i . (v_j - o_i) / s_i                  = A_ij
    dL/dv_j    = sum_i W_ij g_i / s_i
    dL/dq_i    = phi'(q_i) * sum_j A_ij phi(k_j),   dL/dk_j = phi'(k_j) * sum_i A_ij phi(q_i)

and for lln, with the shares r_ijd = exp(alpha q_id + beta k_jd - c_i) of W_ij,

    dL/dq_id   = alpha sum_j A_ij r_ijd,            dL/dk_jd = beta sum_i A_ij r_ijd
    dL/dalpha  = sum_ijd A_ij r_ijd q_id,           dL/dbeta = sum_ijd A_ij r_ijd k_jd.

Unnormalised: o_i = scale sum_j W_ij v_j, A_ij = scale g_i . v_j, dL/dv_j = scale sum_i W_ij g_i.

Affine attention has weights W_ij = a scale x_ij + b, x_ij = qhat_i . khat_j, and factors n_i before
and after: y_i = o_i n_i, so that g_i n_i takes the place of g_i, and then

    dL/da = scale sum A_ij x_ij,   dL/dscale = a sum A_ij x_ij,   dL/db = sum A_ij

where A_ij = g_i . v_j / s_i in a row whose sum s_i was replaced (clamp) or does not divide.

LLN+Diag adds the softmax A of a block, o_i = r o_lln,i + p sum_j A_ij v_j, whose part of the
gradients is, with h = p g,

    X_ij = A_ij (h_i . v_j - sum_l A_il h_i . v_l) / sqrt(D),   dL/dq_i = sum_j X_ij k_j,
    dL/dk_j = sum_i X_ij q_i,   dL/dv_j = sum_i A_ij h_i,   dL/dr = sum g o_lln,  dL/dp = sum g o_diag.

Exact attention is the softmax of one block of all keys. The kernels compared with it have weights

    W_ij = 1 + x_ij + x_ij^2 / 2,   dW_ij/dx_ij = 1 + x_ij,   x_ij = scale q_i . k_j       taylor
    W_ij = qhat_i . khat_j,         qhat = q / sqrt(|q|^2 + 1e-6)                          cosine
    W_ij = mean_m exp(e_ijm),       e_ijm = w_m . (y_i + y_j) - (|y_i|^2 + |y_j|^2) / 2    performer

with y = x / D^(1/4), dL/dq_i = sum_jm A_ij exp(e_ijm) (w_m - y_i) / (M D^(1/4)).

Where alpha and beta come from the moments of q and k they are constants to all gradients. Entropies,
spectral gaps and variances are those of the matrices W_ij / s_i.

Before a file is written, this script itself checks
  1. the output against plain scalar loops over the definition (small cases),
  2. every gradient against central finite differences of the output, below FD_LIMIT,
  3. that the same formulas in fp64 and in fp32 stay well inside the tolerances, so that a fixture
     never asks an implementation for digits which the problem does not have.
The stored values come from NumPy's extended precision (x86: 64-bit significand) rounded once.

    make_fixtures.py            writes fixtures/*.h5 and its folders' beside this script
    make_fixtures.py --check    regenerates into a temporary folder, compares, exits 1 if one differs
"""

import argparse
import dataclasses
import fnmatch
import math
import os
import sys
import tempfile
import zlib

try:
    import numpy as np
except ImportError:
    sys.exit("make_fixtures.py: the Python module numpy is missing (Debian: python3-numpy)")
try:
    import h5py
except ImportError:
    sys.exit("make_fixtures.py: the Python module h5py is missing (Debian: python3-h5py)")

if not __debug__:
    sys.exit("make_fixtures.py: run it without -O, its checks are assertions")

PRODUCER = "data/make_fixtures.py"
SCHEMA = "linattn-1"
FD_LIMIT = 1e-7
RTOL_F64 = 1e-11  # the layout's defaults
RTOL_F32 = 2e-5
# Files with more numbers in their inputs and cotangent than this are compressed, and the numbers
# are rounded so that this helps. The smaller files keep all digits.
COMPRESS_FROM = 800
SIGNIFICANT_BITS = 13
WIDE = np.longdouble
EXPONENTIAL = ("lln", "lln-diag")
LN2 = WIDE("0.693147180559945309417232121458176568")
PI = WIDE("3.14159265358979323846264338327950288")


@dataclasses.dataclass
class Case:
    """One fixture: a problem, its cotangents, and how the file is to be written."""

    name: str
    variant: str
    description: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    causal: bool = False
    normalise: bool = None  # None: the attribute is left out and the default holds
    scale: float = None
    alpha: object = None  # float: attribute; array: dataset, one per query head
    beta: object = None  # float: attribute; array: dataset, one per key/value head
    key_mask: np.ndarray = None
    cu_q: np.ndarray = None
    cu_k: np.ndarray = None
    state: dict = None  # S, z, for lln shift, for affine t and m
    state_g: dict = None  # cotangents of the final S, z and t; affine: those that are there
    # Affine attention. None: the attribute is left out and the default holds.
    a: float = None
    b: float = None
    qk_norm: str = None
    norm_eps: float = None
    small_g: str = None
    g_min: float = None
    center_v: bool = None
    dropout_p: float = None
    seed: int = None
    offset: int = None
    # LLN+Diag.
    block: int = None
    combine: str = None
    diag_r: np.ndarray = None
    diag_p: np.ndarray = None
    # Performer: the rows w_m.
    projection: np.ndarray = None
    # The rule that gives alpha and beta, which are then in this case but not in the file, and its
    # results.
    moments: str = None
    moments_scope: str = None
    expected_moments: dict = None
    # Whether the file has the diagnostics of its matrices; and known values of some of them.
    diagnostics: bool = False
    known: dict = dataclasses.field(default_factory=dict)
    # Rows (B,H,Nq) whose sum of weights is exactly 0. Finite differences hold it there.
    held: np.ndarray = None
    # Entries that finite differences leave alone: kinks, and rows at which the output jumps.
    still: dict = dataclasses.field(default_factory=dict)
    # Gradients that vanish by mathematics: stored as exact zeros, so that comparison is absolute.
    zero: tuple = ()
    # Tolerances in fp32, of the output and of the gradients, where the layout's default is out of
    # reach, with reason.
    rtol_f32: float = RTOL_F32
    grad_rtol_f32: float = RTOL_F32
    folder: str = ""
    storage: str = "<f8"
    strings: str = "fixed-nullterm"
    old_format: bool = False  # the file format of HDF5 before 1.8
    integers: str = "<i8"
    chunks: bool = False
    notes_group: bool = False
    compressed: bool = False

    def normalised(self):
        if self.normalise is not None:
            return self.normalise
        return self.variant not in ("identity", "cosine")

    def parameters(self):
        """The arrays that carry a gradient, by their name in /expected_grad."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.variant in EXPONENTIAL and self.moments is None:
            found.update(alpha=np.asarray(self.alpha), beta=np.asarray(self.beta))
        factors = {"diag_r": self.diag_r, "diag_p": self.diag_p}
        found.update((n, x) for n, x in factors.items() if x is not None)
        if self.variant == "affine":
            found.update((n, np.asarray(affine_setting(self, n))) for n in ("a", "b", "scale"))
        if self.state is not None:
            found.update(("state/" + n, self.state[n]) for n in self.state_names())
        return found

    def state_names(self):
        """The parts of a state that have gradients."""
        return "Szt" if self.variant == "affine" else "Sz"

    def replaced(self, values):
        """This case with other numbers in what parameters() names."""
        plain = {n: x for n, x in values.items() if "/" not in n}
        state = self.state
        if state is not None:
            state = dict(state, **{n[6:]: x for n, x in values.items() if n.startswith("state/")})
        return dataclasses.replace(self, state=state, **plain)

    def members(self):
        """Yields (member, batch entry, query rows, key rows)."""
        if self.cu_q is None:
            for b in range(self.q.shape[0]):
                yield b, b, slice(0, self.q.shape[2]), slice(0, self.k.shape[2])
        else:
            for m in range(len(self.cu_q) - 1):
                yield (
                    m,
                    0,
                    slice(self.cu_q[m], self.cu_q[m + 1]),
                    slice(self.cu_k[m], self.cu_k[m + 1]),
                )


# --------------------------------------------------------------------------------------------------
# The quadratic formulas


def feature(variant, x):
    """phi(x) and phi'(x)."""
    if variant == "identity":
        return x, np.ones_like(x)
    if variant == "elu":
        low = np.exp(np.minimum(x, 0))
        return np.where(x > 0, x + 1, low), np.where(x > 0, np.ones_like(x), low)
    if variant == "relu":
        return np.maximum(x, 0), (x > 0).astype(x.dtype)
    if variant == "quadratic":
        return x * x, 2 * x
    raise ValueError(variant)


class Head:
    """One query head of one member: the weights, the output and its pullback."""

    def __init__(self, case, q, k, v, visible, alpha, beta, state):
        self.case, self.q, self.k, self.v = case, q, k, v
        self.alpha, self.beta, self.state = alpha, beta, state
        one = q.dtype.type(1)
        # Everything at a hidden pair is replaced, never multiplied by zero.
        if case.variant == "lln":
            # The checks in fp64 and fp32 take powers of 2, as an implementation may, and so feel
            # the rounding of the exponents.
            unit = q.dtype.type(1 if q.dtype == WIDE else 1 / LN2)
            power = np.exp if q.dtype == WIDE else np.exp2
            log_share = (unit * alpha) * q[:, None, :] + (unit * beta) * k[None, :, :]
            hidden = np.broadcast_to(~visible[:, :, None], log_share.shape)
            log_share = np.where(hidden, -np.inf, log_share)
            log_state = None
            if state is not None:
                log_state = (unit * alpha) * q + state["shift"] * (unit * q.dtype.type(LN2))
            c = np.zeros((q.shape[0], 1), q.dtype)
            if case.normalised():
                terms = [log_share.reshape(q.shape[0], -1 if q.size else 0)]
                if log_state is not None:
                    terms.append(log_state)
                terms = np.concatenate(terms, axis=1)
                if terms.shape[1]:
                    c = terms.max(axis=1, keepdims=True)
                c = np.where(np.isfinite(c), c, 0)
            self.share = power(log_share - c[:, :, None])
            self.weight = self.share.sum(axis=2)
            self.from_state = None if log_state is None else power(log_state - c)
        else:
            self.phi_q, self.slope_q = feature(case.variant, q)
            self.phi_k, self.slope_k = feature(case.variant, k)
            product = np.einsum("id,jd->ij", self.phi_q, self.phi_k)
            self.weight = np.where(visible, product, 0)
            self.from_state = None if state is None else self.phi_q
        self.visible = visible
        numerator = np.einsum("ij,je->ie", self.weight, v)
        if state is not None:
            numerator = numerator + np.einsum("id,de->ie", self.from_state, state["S"])
        if case.normalised():
            denominator = self.weight.sum(axis=1)
            if state is not None:
                denominator = denominator + np.einsum("id,d->i", self.from_state, state["z"])
            empty = denominator == 0
            self.factor = np.where(empty, 0, one / np.where(empty, one, denominator))
        else:
            scale = 1.0 if case.scale is None else case.scale
            self.factor = np.full(q.shape[0], scale, q.dtype)
        self.o = self.factor[:, None] * numerator

    def pullback(self, g):
        case = self.case
        scaled = g * self.factor[:, None]
        seen = self.visible.any(axis=0)[:, None]  # a key that no query sees may hold anything
        grad = {"v": np.einsum("ij,ie->je", self.weight, scaled)}
        if case.normalised():
            relative = self.v[None, :, :] - self.o[:, None, :]
            a = np.einsum("ie,ije->ij", scaled, relative)
        else:
            a = np.einsum("ie,je->ij", scaled, self.v)
        a = np.where(self.visible, a, 0)
        to_feature = None
        if self.state is not None:
            # dL/dt_id for the state's terms t_id S_d and t_id z_d of numerator and denominator.
            to_feature = np.einsum("ie,de->id", scaled, self.state["S"])
            grad["S"] = np.einsum("id,ie->de", self.from_state, scaled)
            grad["z"] = np.zeros_like(self.state["z"])
            if case.normalised():
                to_row = -np.einsum("ie,ie->i", scaled, self.o)
                to_feature = to_feature + to_row[:, None] * self.state["z"][None, :]
                grad["z"] = np.einsum("id,i->d", self.from_state, to_row)
        if case.variant == "lln":
            weighted = a[:, :, None] * self.share
            by_query, by_key = weighted.sum(axis=1), weighted.sum(axis=0)
            if to_feature is not None:
                by_query = by_query + to_feature * self.from_state
            grad["q"], grad["k"] = self.alpha * by_query, self.beta * by_key
            grad["alpha"] = (self.q * by_query).sum()
            grad["beta"] = (np.where(seen, self.k, 0) * by_key).sum()
        else:
            to_phi_q = np.einsum("ij,jd->id", a, self.phi_k)
            if to_feature is not None:
                to_phi_q = to_phi_q + to_feature
            grad["q"] = self.slope_q * to_phi_q
            grad["k"] = self.slope_k * np.einsum("ij,id->jd", a, self.phi_q)
            grad["k"] = np.where(seen, grad["k"], 0)
        return grad


class SoftmaxHead:
    """One query head of exact attention among the visible pairs: output and pullback."""

    def __init__(self, q, k, v, visible, scale):
        self.q, self.k, self.v, self.scale = q, k, v, scale
        # As in Head, the checks take powers of 2.
        wide = q.dtype == WIDE
        unit = scale if wide else scale * q.dtype.type(1 / LN2)
        x = np.where(visible, unit * np.einsum("id,jd->ij", q, k), -np.inf)
        top = x.max(axis=1, keepdims=True, initial=-np.inf)
        weight = (np.exp if wide else np.exp2)(x - np.where(np.isfinite(top), top, 0))
        total = weight.sum(axis=1, keepdims=True)
        self.a = weight / np.where(total == 0, 1, total)
        self.o = np.einsum("ij,je->ie", self.a, v)

    def pullback(self, g):
        to_a = np.einsum("ie,je->ij", g, self.v)
        to_x = self.a * (to_a - (self.a * to_a).sum(axis=1, keepdims=True))
        return {
            "q": self.scale * np.einsum("ij,jd->id", to_x, self.k),
            "k": self.scale * np.einsum("ij,id->jd", to_x, self.q),
            "v": np.einsum("ij,ie->je", self.a, g),
        }


class PairHead:
    """One query head of a kernel that gives the weight of each pair: output and pullback.

    A kernel sets self.weight, 0 at hidden pairs, and has by_rows(a), the gradients of q and k for
    those of the weights.
    """

    def __init__(self, case, q, k, v, visible):
        self.case, self.q, self.k, self.v, self.visible = case, q, k, v, visible
        self.weigh()
        one = q.dtype.type(1)
        numerator = np.einsum("ij,je->ie", self.weight, v)
        if case.normalised():
            total = self.weight.sum(axis=1)
            self.factor = np.where(total == 0, 0, one / np.where(total == 0, one, total))
        else:
            self.factor = np.full(q.shape[0], self.output_scale(), q.dtype)
        self.o = self.factor[:, None] * numerator

    def output_scale(self):
        return 1.0 if self.case.scale is None else self.case.scale

    def pullback(self, g):
        scaled = g * self.factor[:, None]
        less = self.o[:, None, :] if self.case.normalised() else 0
        a = np.einsum("ie,ije->ij", scaled, self.v[None, :, :] - less)
        q, k = self.by_rows(np.where(self.visible, a, 0))
        return {"q": q, "k": k, "v": np.einsum("ij,ie->je", self.weight, scaled)}


class TaylorHead(PairHead):
    def output_scale(self):
        return 1.0  # the setting scale is that of the scores

    def weigh(self):
        self.s = softmax_scale(self.case, self.q.dtype.type)
        x = self.s * np.einsum("id,jd->ij", self.q, self.k)
        self.weight = np.where(self.visible, 1 + x + x * x / 2, 0)
        self.slope = self.s * (1 + x)

    def by_rows(self, a):
        to_dot = a * self.slope
        return np.einsum("ij,jd->id", to_dot, self.k), np.einsum("ij,id->jd", to_dot, self.q)


class CosineHead(PairHead):
    def weigh(self):
        def unit(x):
            rho = np.sqrt((x * x).sum(axis=1, keepdims=True) + x.dtype.type(1e-6))
            return x / rho, rho

        (self.qhat, self.q_rho), (self.khat, self.k_rho) = unit(self.q), unit(self.k)
        self.weight = np.where(self.visible, self.qhat @ self.khat.T, 0)

    def by_rows(self, a):
        def through(hat, rho, g):
            return (g - hat * (hat * g).sum(axis=1, keepdims=True)) / rho

        return (
            through(self.qhat, self.q_rho, a @ self.khat),
            through(self.khat, self.k_rho, a.T @ self.qhat),
        )


class PerformerHead(PairHead):
    def weigh(self):
        real = self.q.dtype.type
        wide = self.q.dtype == WIDE
        self.root = np.sqrt(np.sqrt(real(self.q.shape[1])))
        self.w = self.case.projection.astype(real)
        self.y_q, self.y_k = self.q / self.root, self.k / self.root
        unit = real(1 if wide else 1 / LN2)  # the checks take powers of 2
        if wide:
            # w_m . (y_i + y_j) - (|y_i|^2 + |y_j|^2) / 2 as it stands
            y = self.y_q[:, None, :] + self.y_k[None, :, :]
            squares = (self.y_q**2).sum(axis=1)[:, None] + (self.y_k**2).sum(axis=1)[None, :]
            exponent = np.einsum("ijd,md->ijm", y, self.w) - squares[:, :, None] / 2
        else:
            logit = [y @ self.w.T - (y * y).sum(axis=1)[:, None] / 2 for y in (self.y_q, self.y_k)]
            exponent = unit * logit[0][:, None, :] + unit * logit[1][None, :, :]
        exponent = np.where(self.visible[:, :, None], exponent, -np.inf)
        top = np.zeros((len(self.q), 1, 1), real)
        if self.case.normalised():
            top = exponent.max(axis=(1, 2), keepdims=True, initial=-np.inf)
            top = np.where(np.isfinite(top), top, 0)
        power = np.exp if wide else np.exp2
        self.share = power(exponent - top) / real(len(self.w))
        self.weight = self.share.sum(axis=2)

    def by_rows(self, a):
        shares = a[:, :, None] * self.share
        along_q, along_k = shares.sum(axis=1), shares.sum(axis=0)
        q = along_q @ self.w - along_q.sum(axis=1)[:, None] * self.y_q
        k = along_k @ self.w - along_k.sum(axis=1)[:, None] * self.y_k
        return q / self.root, k / self.root


PAIR_HEADS = {"taylor": TaylorHead, "cosine": CosineHead, "performer": PerformerHead}


def factors_of(case, h, dtype):
    """r and p of LLN+Diag for a query head."""
    half = np.full(case.v.shape[3], 0.5, dtype)
    r = half if case.diag_r is None else case.diag_r[h].astype(dtype)
    p = half if case.diag_p is None else case.diag_p[h].astype(dtype)
    return r, (1 - r if case.combine == "ratio" else p)


class CombinedHead:
    """One query head of LLN+Diag: lln and the softmax of blocks."""

    def __init__(self, case, q, k, v, visible, in_block, alpha, beta, h):
        self.case = case
        self.r, self.p = factors_of(case, h, q.dtype.type)
        lln = dataclasses.replace(case, variant="lln")
        self.linear = Head(lln, q, k, v, visible, alpha, beta, None)
        scale = 1 / np.sqrt(q.dtype.type(q.shape[1]))
        self.blocks = SoftmaxHead(q, k, v, visible & in_block, scale)
        self.o = self.r * self.linear.o + self.p * self.blocks.o

    def pullback(self, g):
        grad, more = self.linear.pullback(self.r * g), self.blocks.pullback(self.p * g)
        for name, x in more.items():
            grad[name] = grad[name] + x
        less = self.blocks.o if self.case.combine == "ratio" else 0
        grad["diag_r"] = (g * (self.linear.o - less)).sum(axis=0)
        grad["diag_p"] = (g * self.blocks.o).sum(axis=0)
        return grad


def final_shift(case):
    """Base-2 exponents of the final lln state: the smallest integers above all its terms."""
    shift = np.array(case.state["shift"], np.float64)
    beta = np.broadcast_to(np.asarray(case.beta, np.float64), (case.k.shape[1],))
    for m, b, _, keys in case.members():
        for h in range(case.k.shape[1]):
            k = case.k[b, h, keys]
            if case.key_mask is not None:
                k = k[case.key_mask[b, keys] != 0]
            if len(k):
                top = np.ceil((beta[h] * k / math.log(2.0)).max(axis=0))
                shift[m, h] = np.maximum(shift[m, h], top)
    return shift


def evaluate(case, dtype, backward=True, shift_out=None):
    """Outputs {o, state/S, state/z} and, if wanted, gradients, all computed in dtype."""
    if case.variant == "affine":
        return evaluate_affine(case, dtype, backward)
    q, k, v, g = (np.asarray(x).astype(dtype) for x in (case.q, case.k, case.v, case.g))
    batch, heads, _, d = q.shape
    kv_heads, dv = k.shape[1], v.shape[3]
    alpha = beta = None
    if case.variant in EXPONENTIAL:
        alpha = np.broadcast_to(np.asarray(case.alpha).astype(dtype), (heads,))
        beta = np.broadcast_to(np.asarray(case.beta).astype(dtype), (kv_heads,))
    out = {"o": np.zeros(q.shape[:3] + (dv,), dtype)}
    grad = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    if case.variant in EXPONENTIAL:
        grad["alpha"], grad["beta"] = np.zeros(heads, dtype), np.zeros(kv_heads, dtype)
    factors = [n for n in ("diag_r", "diag_p") if getattr(case, n) is not None]
    grad.update((n, np.zeros((heads, dv), dtype)) for n in factors)
    block = d if case.block is None else case.block
    if case.state is not None:
        out["state/S"], out["state/z"] = (case.state[n].astype(dtype) for n in "Sz")
        grad["state/S"], grad["state/z"] = (np.zeros_like(out["state/" + n]) for n in "Sz")

    for m, b, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        seen = np.arange(nk)
        if case.key_mask is not None:
            seen = seen[case.key_mask[b, keys] != 0]
        at = keys.start + seen
        visible = np.ones((nq, len(seen)), bool)
        position = np.arange(nq)[:, None] + (nk - nq)
        if case.causal:
            visible = seen[None, :] <= position
        for h in range(heads):
            source = h // (heads // kv_heads)
            state = None
            if case.state is not None:
                state = {n: x[m, source].astype(dtype) for n, x in case.state.items()}
            parts = q[b, h, rows], k[b, source, at], v[b, source, at]
            rates = (None, None) if alpha is None else (alpha[h], beta[source])
            if case.variant == "lln-diag":
                in_block = seen[None, :] // block == position // block
                head = CombinedHead(case, *parts, visible, in_block, *rates, h)
            elif case.variant == "softmax":
                head = SoftmaxHead(*parts, visible, softmax_scale(case, dtype))
            elif case.variant in PAIR_HEADS:
                head = PAIR_HEADS[case.variant](case, *parts, visible)
            else:
                head = Head(case, *parts, visible, *rates, state)
            out["o"][b, h, rows] = head.o
            if backward:
                part = head.pullback(g[b, h, rows])
                grad["q"][b, h, rows] = part["q"]
                grad["k"][b, source, at] += part["k"]
                grad["v"][b, source, at] += part["v"]
                if alpha is not None:
                    grad["alpha"][h] += part["alpha"]
                    grad["beta"][source] += part["beta"]
                for name in factors:
                    grad[name][h] += part[name]
                if state is not None:
                    grad["state/S"][m, source] += part["S"]
                    grad["state/z"][m, source] += part["z"]
        if case.state is None:
            continue
        for h in range(kv_heads):
            ks, vs = k[b, h, at], v[b, h, at]
            kept = np.ones(d, dtype)
            if case.variant == "lln":
                to = shift_out[m, h].astype(dtype) * dtype(LN2)
                kept = np.exp(case.state["shift"][m, h].astype(dtype) * dtype(LN2) - to)
                phi = np.exp(beta[h] * ks - to)
                slope = beta[h] * phi
            else:
                phi, slope = feature(case.variant, ks)
            out["state/S"][m, h] = kept[:, None] * out["state/S"][m, h] + np.einsum(
                "jd,je->de", phi, vs
            )
            out["state/z"][m, h] = kept * out["state/z"][m, h] + phi.sum(axis=0)
            if backward:
                gs, gz = (case.state_g[n][m, h].astype(dtype) for n in "Sz")
                to_phi = np.einsum("je,de->jd", vs, gs) + gz
                grad["k"][b, h, at] += slope * to_phi
                grad["v"][b, h, at] += np.einsum("jd,de->je", phi, gs)
                grad["state/S"][m, h] += kept[:, None] * gs
                grad["state/z"][m, h] += kept * gz
                if beta is not None:
                    grad["beta"][h] += (ks * phi * to_phi).sum()
    for name in ("alpha", "beta"):
        if name in grad and case.moments is not None:
            del grad[name]
        elif name in grad and np.ndim(getattr(case, name)) == 0:
            grad[name] = grad[name].sum()
    return out, (grad if backward else None)


def softmax_scale(case, dtype):
    return 1 / np.sqrt(dtype(case.q.shape[3])) if case.scale is None else dtype(case.scale)


# --------------------------------------------------------------------------------------------------
# Moments and diagnostics

AUTHORS_SLOPE, AUTHORS_INTERCEPT = 0.14855178144710912, -0.35487039130661086


def deviation(x):
    """Standard deviation of all entries, divisor n - 1."""
    x = np.asarray(x).astype(WIDE).ravel()
    return np.sqrt(((x - x.mean()) ** 2).sum() / (x.size - 1))


def with_moments(case, scope=None):
    """Gives the case the alpha and beta of the authors' rule for its q and visible k."""
    heads, kv_heads = case.q.shape[1], case.k.shape[1]
    seen = np.ones((case.k.shape[0], case.k.shape[2]), bool)
    if case.key_mask is not None:
        seen = case.key_mask != 0
    visible = [case.k[:, h][seen] for h in range(kv_heads)]
    if scope == "head":
        groups = case.q.reshape(case.q.shape[:1] + (kv_heads, heads // kv_heads) + case.q.shape[2:])
        sigma_q = np.array([deviation(groups[:, h]) for h in range(kv_heads)])
        sigma_k = np.array([deviation(x) for x in visible])
    else:
        sigma_q, sigma_k = deviation(case.q), deviation(np.concatenate(visible))
    st2 = ((sigma_q * sigma_k) ** 2 - WIDE(AUTHORS_INTERCEPT)) / WIDE(AUTHORS_SLOPE)
    assert np.all(sigma_q > 1e-3) and np.all(sigma_k > 1e-3) and np.all(st2 < 60)
    alpha, beta = np.sqrt(st2 / 2) / sigma_q, np.sqrt(st2 / 2) / sigma_k
    if scope == "head":
        alpha = np.repeat(alpha, heads // kv_heads)
    case.moments, case.moments_scope, case.alpha, case.beta = "authors", scope, alpha, beta
    case.expected_moments = dict(sigma_q=sigma_q, sigma_k=sigma_k, alpha=alpha, beta=beta)
    scalar_moments(case)
    return case


def scalar_moments(case):
    """The deviations once more, one number at a time, and that the rule is inverted by its line."""
    batch, heads, nq, d = case.q.shape
    kv_heads, nk = case.k.shape[1:3]
    count = kv_heads if case.moments_scope == "head" else 1
    queries, keys = [[] for _ in range(count)], [[] for _ in range(count)]
    for b in range(batch):
        for h in range(heads):
            group = math.floor(h / (heads / kv_heads)) if count > 1 else 0
            queries[group] += [x for i in range(nq) for x in case.q[b, h, i].tolist()]
        for h in range(kv_heads):
            for j in range(nk):
                if case.key_mask is None or case.key_mask[b, j]:
                    keys[h if count > 1 else 0] += case.k[b, h, j].tolist()
    found = {n: np.atleast_1d(x) for n, x in case.expected_moments.items()}
    for n in range(count):
        sigma = {}
        for name, x in (("sigma_q", queries[n]), ("sigma_k", keys[n])):
            mean = math.fsum(x) / len(x)
            sigma[name] = math.sqrt(math.fsum((y - mean) ** 2 for y in x) / (len(x) - 1))
            assert abs(float(found[name][n]) - sigma[name]) < 1e-14 * sigma[name], case.name
        per_group = heads // kv_heads if count > 1 else 1
        for h in range(n * per_group, (n + 1) * per_group):
            a, b = float(found["alpha"][h]), float(found["beta"][n])
            halves = (a * sigma["sigma_q"]) ** 2, (b * sigma["sigma_k"]) ** 2
            target = AUTHORS_SLOPE * sum(halves) + AUTHORS_INTERCEPT
            assert abs(halves[0] - halves[1]) < 1e-13 * halves[0], case.name
            assert abs(target - (sigma["sigma_q"] * sigma["sigma_k"]) ** 2) < 1e-13, case.name


def matrices(case):
    """The matrix P of every batch entry and query head, without masks but the causal one."""
    assert case.key_mask is None and case.cu_q is None and case.state is None
    assert case.q.shape[2] == case.k.shape[2] and case.normalised()
    q, k, v = (np.asarray(x).astype(WIDE) for x in (case.q, case.k, case.v))
    batch, heads, n, _ = q.shape
    visible = np.tri(n, dtype=bool) if case.causal else np.ones((n, n), bool)
    p = np.zeros((batch, heads, n, n), WIDE)
    for b in range(batch):
        for h in range(heads):
            source = h // (heads // k.shape[1])
            parts = q[b, h], k[b, source], v[b, source], visible
            if case.variant == "softmax":
                p[b, h] = SoftmaxHead(*parts, softmax_scale(case, WIDE)).a
            else:
                rates = (None, None)
                if case.variant == "lln":
                    rates = (
                        np.broadcast_to(np.asarray(x).astype(WIDE), (count,))[at]
                        for x, count, at in (
                            (case.alpha, heads, h),
                            (case.beta, k.shape[1], source),
                        )
                    )
                head = Head(case, *parts, *rates, None)
                p[b, h] = head.weight * head.factor[:, None]
    return p


def second_eigenvalue(p):
    """|lambda_2| of a matrix with row sums 1.

    The mean of the columns taken out of every row leaves all eigenvalues but that of 1; the norms
    of the squares of what is left, of its fourth power and so on, tell the largest.
    """
    a = p - p.mean(axis=0)
    log_size = WIDE(0)  # a = exp(log_size) times what is kept
    power = 1
    for _ in range(60):
        size = np.sqrt((a * a).sum())
        if size < 1e-17 and power == 1:
            return WIDE(0)
        if size == 0:
            return WIDE(0)
        a, log_size = a / size, log_size + np.log(size)
        a, log_size, power = a @ a, 2 * log_size, 2 * power
    size = np.sqrt((a * a).sum())
    if size == 0:
        return WIDE(0)
    return np.exp((log_size + np.log(size)) / power)


def bits(p):
    """Entropies of the rows in bits; 0 log 0 = 0."""
    return -(p * np.log2(np.where(p > 0, p, 1))).sum(axis=-1)


def diagnostics_of(case):
    """The datasets (B, H) of /expected/diagnostics."""
    p = matrices(case)
    n = p.shape[2]
    names = ["entropy", "spectral_gap", "logvar", "logvar_within"]
    if not case.causal:
        names += ["entropy_biased", "entropy_unbiased", "variance"]
    found = {name: np.zeros(p.shape[:2], WIDE) for name in names}
    for at in np.ndindex(p.shape[:2]):
        m = p[at]
        assert np.max(np.abs(m.sum(axis=1) - 1)) < 1e-15
        shown = np.tri(n, dtype=bool) if case.causal else np.ones((n, n), bool)
        assert np.all(m[shown] > 0)
        logs = [np.log(row[see]) for row, see in zip(m, shown)]
        everything = np.concatenate(logs)
        entropy = bits(m).mean()
        found["entropy"][at] = entropy
        found["logvar"][at] = ((everything - everything.mean()) ** 2).mean()
        found["logvar_within"][at] = np.mean([((x - x.mean()) ** 2).mean() for x in logs])
        if case.causal:
            # Triangular: the eigenvalues are the diagonal, the first of them 1.
            second = max(np.diag(m)[1:])
        else:
            second = second_eigenvalue(m)
            by_size = np.sort(np.abs(np.linalg.eigvals(m.astype(np.float64))))
            assert abs(by_size[-1] - 1) < 1e-12
            assert abs(by_size[-2] - second) < 1e-7, f"{case.name}: {by_size[-2]}, {second}"
            columns = bits(m.mean(axis=0))
            found["entropy_biased"][at] = np.log2(WIDE(n)) - columns
            found["entropy_unbiased"][at] = columns - entropy
            found["variance"][at] = ((m - m.mean()) ** 2).mean()
        found["spectral_gap"][at] = 1 - second
    for name, value in case.known.items():
        error = np.max(np.abs(found[name] - value))
        assert error < 1e-16, f"{case.name}: {name} is off its known value by {error}"
        found[name] = np.broadcast_to(np.asarray(value, WIDE), p.shape[:2])
    return found


# --------------------------------------------------------------------------------------------------
# Affine attention


def philox(counter, key):
    """Philox4x32-10: four words of 32 bits from a counter of four and a key of two."""
    mask = 0xFFFFFFFF
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


# Known answers of Random123.
assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
assert philox(
    (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)
) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
assert philox(
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def words_of(case, e):
    """The four words of the elements 4 floor(e / 4) ... 4 floor(e / 4) + 3."""
    seed, offset = affine_setting(case, "seed"), affine_setting(case, "offset")
    counter = [x >> shift & 0xFFFFFFFF for x in (e >> 2, offset) for shift in (0, 32)]
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))


def noise(case, dtype):
    """n of every element of o: in fp32 from 24 bits of each word, else from 32."""
    extents = case.q.shape[:3] + case.v.shape[3:]
    size = int(np.prod(extents))
    words = [word for e in range(0, size, 4) for word in words_of(case, e)]
    words = np.array(words, np.uint64).reshape(-1, 4)
    if dtype == np.float32:
        u = ((words >> np.uint64(8)).astype(dtype) + dtype(0.5)) * dtype(2.0**-24)
    else:
        u = (words.astype(dtype) + dtype(0.5)) * dtype(2.0**-32)
    r, t = np.sqrt(dtype(-2) * np.log(u[:, 0::2])), dtype(2) * dtype(PI) * u[:, 1::2]
    n = np.stack([r * np.cos(t), r * np.sin(t)], axis=2)
    return n.reshape(-1)[:size].reshape(extents)


def affine_setting(case, name):
    """What the case says, or the layout's default."""
    value = getattr(case, name)
    if value is not None:
        return value
    if name == "scale":
        d = WIDE(case.q.shape[3])
        return 1 / np.sqrt(d) if affine_setting(case, "qk_norm") == "none" else WIDE(1)
    return {
        "a": 1.0,
        "b": 1.0,
        "qk_norm": "l2",
        "norm_eps": 1e-6,
        "small_g": "check",
        "g_min": 1e-6,
        "center_v": False,
        "dropout_p": 0.0,
        "seed": 0,
        "offset": 0,
    }[name]


def normalised_rows(case, x):
    """xhat of the rows x, and the map from its cotangent to that of x."""
    norm = affine_setting(case, "qk_norm")
    if norm == "none" or len(x) == 0:
        return x, lambda g: g
    squares = (x * x).sum(axis=1, keepdims=True)
    if norm == "l2":
        squares = squares + x.dtype.type(affine_setting(case, "norm_eps"))
        rho = np.sqrt(np.where(squares == 0, x.dtype.type(1), squares))
        y = x / rho
        return y, lambda g: (g - y * (y * g).sum(axis=1, keepdims=True)) / rho
    top = int(np.argmax(squares))  # the first of equal ones
    rho = np.sqrt(squares[top, 0])
    if rho == 0:
        return x, lambda g: g
    y = x / rho

    def pullback(g):
        dx = g / rho
        dx[top] -= y[top] * (y * g).sum() / rho
        return dx

    return y, pullback


def evaluate_affine(case, dtype, backward=True, facts=None):
    """Outputs {o, state/S, state/z, state/t, state/m} and gradients, all computed in dtype.

    facts, if given, receives what tells how well the problem determines its results.
    """
    q, k, v, g = (np.asarray(x).astype(dtype) for x in (case.q, case.k, case.v, case.g))
    heads, kv_heads, dv = q.shape[1], k.shape[1], v.shape[3]
    a, b, scale = (dtype(affine_setting(case, n)) for n in ("a", "b", "scale"))
    rate = a * scale
    clamp, least = affine_setting(case, "small_g") == "clamp", dtype(affine_setting(case, "g_min"))
    factors = np.ones(q.shape[:3] + (dv,), dtype)
    if affine_setting(case, "dropout_p"):
        factors = factors + dtype(affine_setting(case, "dropout_p")) * noise(case, dtype)
    # The values less those of the first key: the same result with other rounding, so that nothing
    # needs it in extended precision.
    center = affine_setting(case, "center_v") and dtype != WIDE
    assert not center or (case.normalised() and not clamp and case.state is None)

    out = {"o": np.zeros_like(factors)}
    grad = {n: np.zeros_like(x) for n, x in (("q", q), ("k", k), ("v", v))}
    grad.update((n, dtype(0)) for n in ("a", "b", "scale"))
    if case.state is not None:
        for n in "Szt":
            out["state/" + n] = case.state[n].astype(dtype)
            grad["state/" + n] = np.zeros_like(out["state/" + n])
        out["state/m"] = np.array(case.state["m"], np.int64)
    if facts is not None:
        facts.update(ratio=[], replaced=[], zero=np.zeros(q.shape[:3], bool), kappa=[], negative=[])
        facts.update(terms_a=0.0, terms_b=0.0)

    for m, batch, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        seen = np.arange(nk)
        if case.key_mask is not None:
            seen = seen[case.key_mask[batch, keys] != 0]
        at = keys.start + seen
        visible = np.ones((nq, len(seen)), bool)
        if case.causal:
            visible = seen[None, :] <= np.arange(nq)[:, None] + (nk - nq)
        before = 0 if case.state is None else int(case.state["m"][m])
        count = visible.sum(axis=1) + before
        for source in range(kv_heads):
            khat, k_pullback = normalised_rows(case, k[batch, source, at])
            values = v[batch, source, at]
            middle = values[0] if center and len(at) else np.zeros(dv, dtype)
            values = values - middle
            to_khat, to_values = np.zeros_like(khat), np.zeros_like(values)
            state = None
            if case.state is not None:
                state = {n: case.state[n][m, source].astype(dtype) for n in "Szt"}
            group = heads // kv_heads
            for h in range(source * group, (source + 1) * group):
                qhat, q_pullback = normalised_rows(case, q[batch, h, rows])
                x = np.einsum("id,jd->ij", qhat, khat)
                weight = np.where(visible, rate * x + b, 0)
                top, total = np.einsum("ij,je->ie", weight, values), weight.sum(axis=1)
                if state is not None:
                    top = top + rate * np.einsum("id,de->ie", qhat, state["S"]) + b * state["t"]
                    total = total + rate * np.einsum("id,d->i", qhat, state["z"])
                    total = total + b * dtype(before)
                sums = total
                if case.held is not None:
                    total = np.where(case.held[batch, h, rows], 0, total)
                divided = np.ones(nq, bool)  # whether a gradient flows through the sum
                factor = np.ones(nq, dtype)
                if case.normalised():
                    if clamp:
                        divided = ~(np.abs(total) < least * count)
                        bound = np.where(total < 0, -least * count, least * count)
                        total = np.where(divided, total, bound)
                    empty = (count == 0) | (total == 0)
                    factor = np.where(empty, 0, 1 / np.where(empty, 1, total)).astype(dtype)
                else:
                    divided[:] = False
                o = factor[:, None] * top
                noisy = factors[batch, h, rows]
                out["o"][batch, h, rows] = noisy * (o + (factor != 0)[:, None] * middle)

                u = g[batch, h, rows] * noisy * factor[:, None]
                kept = np.where(divided[:, None], o, 0)
                c = (u * kept).sum(axis=1)
                e = np.einsum("ie,ije->ij", u, values[None, :, :] - kept[:, None, :])
                e = np.where(visible, e, 0)
                to_qhat = rate * np.einsum("ij,jd->id", e, khat)
                to_khat += rate * np.einsum("ij,id->jd", e, qhat)
                to_values += np.einsum("ij,ie->je", weight, u)
                by_x, by_one = (e * x).sum(), e.sum()
                if state is not None:
                    to_state = np.einsum("ie,de->id", u, state["S"]) - c[:, None] * state["z"]
                    to_qhat = to_qhat + rate * to_state
                    by_x = by_x + (qhat * to_state).sum()
                    to_sum = np.einsum("ie,e->i", u, state["t"]) - c * dtype(before)
                    by_one = by_one + to_sum.sum()
                    grad["state/S"][m, source] += rate * np.einsum("id,ie->de", qhat, u)
                    grad["state/z"][m, source] -= rate * np.einsum("id,i->d", qhat, c)
                    grad["state/t"][m, source] += b * u.sum(axis=0)
                grad["q"][batch, h, rows] = q_pullback(to_qhat)
                grad["a"] += scale * by_x
                grad["scale"] += a * by_x
                grad["b"] += by_one
                if facts is not None:
                    some = count > 0
                    facts["zero"][batch, h, rows] = some & (sums == 0)
                    some &= sums != 0
                    facts["ratio"] += list(np.abs(sums[some]) / count[some])
                    facts["replaced"] += list(np.sign(sums[some]) * ~divided[some])
                    if state is None:
                        facts["kappa"] += list((np.abs(weight).sum(axis=1) / np.abs(sums))[some])
                    facts["negative"] += list(weight[visible] < 0)
                    # d a and d b as a running sum has them, each term by its size.
                    by_value = np.where(visible, np.einsum("ie,je->ij", u, values), 0)
                    shown = np.where(visible, x, 0)
                    facts["terms_a"] += np.abs(scale * (shown * by_value).sum(axis=1)).sum()
                    facts["terms_a"] += np.abs(scale * c * shown.sum(axis=1)).sum()
                    facts["terms_b"] += np.abs(by_value.sum(axis=1)).sum() + np.abs(c * count).sum()
            values = v[batch, source, at]
            if state is not None:
                out["state/S"][m, source] += np.einsum("jd,je->de", khat, values)
                out["state/z"][m, source] += khat.sum(axis=0)
                out["state/t"][m, source] += values.sum(axis=0)
                final = {
                    n: case.state_g[n][m, source].astype(dtype)
                    if n in case.state_g
                    else np.zeros_like(state[n])
                    for n in "Szt"
                }
                to_khat += np.einsum("je,de->jd", values, final["S"]) + final["z"]
                to_values += np.einsum("jd,de->je", khat, final["S"]) + final["t"]
                for n in "Szt":
                    grad["state/" + n][m, source] += final[n]
            grad["k"][batch, source, at] = k_pullback(to_khat)
            grad["v"][batch, source, at] = to_values
        if case.state is not None:
            out["state/m"][m] += len(seen)
    return out, (grad if backward else None)


def scalar_affine(case):
    """o of affine attention by loops over the definition, one number at a time."""
    batch, heads, nq_all, d = case.q.shape
    kv_heads, dv = case.k.shape[1], case.v.shape[3]
    a, b, scale, p = (float(affine_setting(case, n)) for n in ("a", "b", "scale", "dropout_p"))
    norm, eps = affine_setting(case, "qk_norm"), affine_setting(case, "norm_eps")
    g_min, clamp = affine_setting(case, "g_min"), affine_setting(case, "small_g") == "clamp"
    o = np.zeros((batch, heads, nq_all, dv))

    def length(row):
        return math.sqrt(math.fsum(x * x for x in row))

    for m, at, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        shown = [
            j for j in range(nk) if case.key_mask is None or case.key_mask[at, keys.start + j]
        ]
        for h in range(heads):
            source = math.floor(h / (heads / kv_heads))
            query = case.q[at, h, rows].tolist()
            key, value = case.k[at, source, keys].tolist(), case.v[at, source, keys].tolist()
            longest_q = max([length(row) for row in query], default=0.0) or 1.0
            longest_k = max([length(key[j]) for j in shown], default=0.0) or 1.0

            def hat(row, longest):
                if norm == "none":
                    return row
                rho = longest if norm == "max" else math.sqrt(length(row) ** 2 + eps)
                return [x / rho for x in row]

            for i in range(nq):
                weights, values, sums = [], [], []
                qhat = hat(query[i], longest_q)
                for j in shown:
                    if case.causal and j > i + nk - nq:
                        continue
                    khat = hat(key[j], longest_k)
                    weights.append(a * scale * math.fsum(x * y for x, y in zip(qhat, khat)) + b)
                    values.append(value[j])
                count, sums = len(weights), list(weights)
                if case.state is not None:
                    # Row x of S has the weight of one more value, and t that of another.
                    weights += [a * scale * x for x in qhat] + [b]
                    values += case.state["S"][m, source].tolist()
                    values.append(case.state["t"][m, source].tolist())
                    z, old = case.state["z"][m, source].tolist(), int(case.state["m"][m])
                    sums += [a * scale * x * y for x, y in zip(qhat, z)] + [b * old]
                    count += old
                total = math.fsum(sums)
                if clamp and abs(total) < g_min * count:
                    total = -g_min * count if total < 0 else g_min * count
                for c in range(dv):
                    y = math.fsum(w * row[c] for w, row in zip(weights, values))
                    if case.normalised():
                        y = 0.0 if count == 0 or total == 0 else y / total
                    if p:
                        e = ((at * heads + h) * nq_all + int(rows.start) + i) * dv + c
                        u = [(word + 0.5) / 2.0**32 for word in words_of(case, e)]
                        u1, u2 = u[0:2] if e % 4 < 2 else u[2:4]
                        turn = math.sin if e % 2 else math.cos
                        y *= 1.0 + p * math.sqrt(-2.0 * math.log(u1)) * turn(2.0 * math.pi * u2)
                    o[at, h, rows.start + i, c] = y
    return o


def affine_is_sound(case, least):
    """Whether fp32 can be asked for the results of this draw.

    No row's sum comes near 0 (below `least` for each key) or near the bound of a clamp, and d a and
    d b are not small beside their terms: in fp32 each term is off by some 2^-24, so that terms of
    60 times their sum leave an error of 4e-6 of it, even if all their errors add up.
    """
    facts = {}
    out, grad = evaluate_affine(case, np.float64, facts=facts)
    ratio, replaced = np.array(facts["ratio"]), np.array(facts["replaced"])
    held = np.zeros_like(facts["zero"]) if case.held is None else case.held
    if case.normalised():
        if not np.array_equal(held, facts["zero"]):
            return False
        if np.any(ratio[replaced == 0] < least):
            return False
    if affine_setting(case, "small_g") == "clamp":
        share = np.mean(replaced != 0)
        if np.any(np.abs(ratio - case.g_min) < 0.01) or not 0.1 < share < 0.5:
            return False
        if not np.any(replaced > 0) or not np.any(replaced < 0):
            return False
    for n in "ab":
        if n not in case.zero and not facts["terms_" + n] <= 60 * abs(grad[n]):
            return False
    return True


# --------------------------------------------------------------------------------------------------
# The script's own checks


def relative_error(found, reference):
    """The layout's comparison: max|difference| / max|reference|, absolute where that is 0."""
    found, reference = np.asarray(found, WIDE), np.asarray(reference, WIDE)
    if reference.size == 0:
        return 0.0
    worst = np.max(np.abs(found - reference))
    size = np.max(np.abs(reference))
    if not (np.isfinite(worst) and np.isfinite(size)):
        return math.inf
    return float(worst / size if size > 0 else worst)


def scalar_blocks(case, scale, whole=False):
    """o of the softmax of blocks, or of all keys, by loops over the definition."""
    batch, heads, nq_all, d = case.q.shape
    kv_heads, dv = case.k.shape[1], case.v.shape[3]
    block = d if case.block is None else case.block
    o = np.zeros((batch, heads, nq_all, dv))
    for _, b, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        for h in range(heads):
            source = math.floor(h / (heads / kv_heads))
            key, value = case.k[b, source, keys].tolist(), case.v[b, source, keys].tolist()
            for i, query in enumerate(case.q[b, h, rows].tolist()):
                position = i + nk - nq
                found = [
                    (scale * math.fsum(x * y for x, y in zip(query, key[j])), value[j])
                    for j in range(nk)
                    if (whole or math.floor(j / block) == math.floor(position / block))
                    and (j <= position or not case.causal)
                    and (case.key_mask is None or case.key_mask[b, keys.start + j])
                ]
                if not found:
                    continue
                top = max(x for x, _ in found)
                weights = [math.exp(x - top) for x, _ in found]
                for e in range(dv):
                    top_e = math.fsum(w * row[e] for w, (_, row) in zip(weights, found))
                    o[b, h, rows.start + i, e] = top_e / math.fsum(weights)
    return o


def scalar_combined(case):
    """o of LLN+Diag from the two parts."""
    linear = scalar_forward(dataclasses.replace(case, variant="lln"))
    blocks = scalar_blocks(case, 1 / math.sqrt(case.q.shape[3]))
    for h in range(case.q.shape[1]):
        for e in range(case.v.shape[3]):
            r = 0.5 if case.diag_r is None else float(case.diag_r[h, e])
            p = 0.5 if case.diag_p is None else float(case.diag_p[h, e])
            if case.combine == "ratio":
                p = 1.0 - r
            linear[:, h, :, e] = r * linear[:, h, :, e] + p * blocks[:, h, :, e]
    return linear


def scalar_pairs(case):
    """o of the kernels that softmax is compared with, one number at a time."""
    batch, heads, nq_all, d = case.q.shape
    kv_heads, dv = case.k.shape[1], case.v.shape[3]
    o = np.zeros((batch, heads, nq_all, dv))
    root = float(d) ** 0.25

    def dot(x, y):
        return math.fsum(a * b for a, b in zip(x, y))

    def weights_of(query, keys):
        if case.variant == "taylor":
            scale = 1 / math.sqrt(d) if case.scale is None else case.scale
            scores = [scale * dot(query, key) for key in keys]
            return [0.5 + (1.0 + x) ** 2 / 2.0 for x in scores]
        if case.variant == "cosine":
            long = math.sqrt(dot(query, query) + 1e-6)
            return [dot(query, k) / (long * math.sqrt(dot(k, k) + 1e-6)) for k in keys]
        exponents = []
        for key in keys:
            sums = [(x + y) / root for x, y in zip(query, key)]
            half = (dot(query, query) + dot(key, key)) / (2.0 * root * root)
            exponents.append([dot(w, sums) - half for w in case.projection.tolist()])
        top = max(map(max, exponents)) if case.normalised() and exponents else 0.0
        count = len(case.projection)
        return [math.fsum(math.exp(x - top) for x in row) / count for row in exponents]

    for _, b, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        for h in range(heads):
            source = math.floor(h / (heads / kv_heads))
            key, value = case.k[b, source, keys].tolist(), case.v[b, source, keys].tolist()
            for i, query in enumerate(case.q[b, h, rows].tolist()):
                seen = [
                    j
                    for j in range(nk)
                    if (j <= i + nk - nq or not case.causal)
                    and (case.key_mask is None or case.key_mask[b, keys.start + j])
                ]
                weights = weights_of(query, [key[j] for j in seen])
                if case.normalised():
                    total = math.fsum(weights)
                    weights = [w / total for w in weights] if total else []
                elif case.variant != "taylor" and case.scale is not None:
                    weights = [w * case.scale for w in weights]
                for e in range(dv):
                    o[b, h, rows.start + i, e] = math.fsum(
                        w * value[j][e] for w, j in zip(weights, seen)
                    )
    return o


def scalar_forward(case):
    """o by loops over the definition, one number at a time."""
    if case.variant in PAIR_HEADS:
        return scalar_pairs(case)
    if case.variant == "affine":
        return scalar_affine(case)
    if case.variant == "lln-diag":
        return scalar_combined(case)
    if case.variant == "softmax":
        return scalar_blocks(case, float(softmax_scale(case, WIDE)), whole=True)
    scalar = {
        "identity": lambda x: x,
        "elu": lambda x: x + 1.0 if x > 0.0 else math.exp(x),
        "relu": lambda x: max(x, 0.0),
        "quadratic": lambda x: x * x,
    }
    batch, heads, nq_all, d = case.q.shape
    kv_heads, dv = case.k.shape[1], case.v.shape[3]
    o = np.zeros((batch, heads, nq_all, dv))
    q, k, v = case.q.tolist(), case.k.tolist(), case.v.tolist()
    for m, b, rows, keys in case.members():
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        for h in range(heads):
            source = math.floor(h / (heads / kv_heads))
            for i in range(nq):
                query, logs, weights, values, top = q[b][h][rows.start + i], [], [], [], 0.0
                for j in range(nk):
                    if case.causal and j > i + nk - nq:
                        continue
                    if case.key_mask is not None and not case.key_mask[b, keys.start + j]:
                        continue
                    key = k[b][source][keys.start + j]
                    values.append(v[b][source][keys.start + j])
                    if case.variant == "lln":
                        a = np.broadcast_to(case.alpha, (heads,))[h].item()
                        c = np.broadcast_to(case.beta, (kv_heads,))[source].item()
                        logs.append([a * query[x] + c * key[x] for x in range(d)])
                    else:
                        phi = scalar[case.variant]
                        weights.append(math.fsum(phi(query[x]) * phi(key[x]) for x in range(d)))
                if case.variant == "lln" and logs:
                    top = max(map(max, logs)) if case.normalised() else 0.0
                    weights = [math.fsum(math.exp(x - top) for x in row) for row in logs]
                parts = list(weights)
                if case.state is not None:
                    # Feature x of the query weighs row x of S and entry x of z.
                    state = {n: s[m][source].tolist() for n, s in case.state.items()}
                    if case.variant == "lln":
                        a = np.broadcast_to(case.alpha, (heads,))[h].item()
                        logs = [a * query[x] + state["shift"][x] * math.log(2.0) for x in range(d)]
                        if not weights and case.normalised():
                            top = max(logs)
                        extra = [math.exp(x - top) for x in logs]
                    else:
                        extra = [scalar[case.variant](x) for x in query]
                    parts += [t * z for t, z in zip(extra, state["z"])]
                    weights += extra
                    values += state["S"]
                total = math.fsum(parts)
                for e in range(dv):
                    sum_e = math.fsum(w * row[e] for w, row in zip(weights, values))
                    if not case.normalised():
                        sum_e *= 1.0 if case.scale is None else case.scale
                    elif total == 0.0:
                        sum_e = 0.0
                    else:
                        sum_e /= total
                    o[b, h, rows.start + i, e] = sum_e
    return o


def continued(case, out):
    """A causal run cut in two, the second part started from the first's state, is the whole."""
    cut = (case.q.shape[2] + 1) // 2
    parts = []
    state = case.state
    for rows in (slice(0, cut), slice(cut, None)):
        part = dataclasses.replace(
            case, state=state, **{n: getattr(case, n)[:, :, rows] for n in "qkvg"}
        )
        shift = final_shift(part) if case.variant == "lln" else None
        found, _ = evaluate(part, WIDE, backward=False, shift_out=shift)
        parts.append(found["o"])
        state = {n[6:]: x for n, x in found.items() if n.startswith("state/")}
        if shift is not None:
            state["shift"] = shift
    error = max(
        relative_error(np.concatenate(parts, axis=2), out["o"]),
        *(relative_error(state[n[6:]], x) for n, x in out.items() if n.startswith("state/")),
    )
    assert error < 1e-13, f"{case.name}: continuing from the state differs by {error}"


def loss(case, values, shift_out):
    out, _ = evaluate(case.replaced(values), WIDE, backward=False, shift_out=shift_out)
    total = (out["o"] * case.g.astype(WIDE)).sum()
    if case.state is not None:
        for n, g in case.state_g.items():
            total = total + (out["state/" + n] * g.astype(WIDE)).sum()
    return total


def finite_differences(case, grad, shift_out, rng):
    """Largest error of the gradients against fourth-order central differences.

    Random directions through each tensor; one entry at a time as well where that is cheap. The step
    follows the tensor's size for the homogeneous maps and is absolute for the exponential ones.
    """
    values = {n: np.asarray(x).astype(WIDE) for n, x in case.parameters().items()}
    worst = 0.0

    def derivative(name, direction):
        h = WIDE(1e-4)
        total = WIDE(0)
        for step, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            moved = dict(values, **{name: values[name] + step * h * direction})
            total = total + factor * loss(case, moved, shift_out)
        return total / (12 * h)

    entries = sum(x.size for x in values.values())
    for name, x in values.items():
        if x.size == 0:
            continue
        free = ~case.still.get(name, np.zeros(x.shape, bool)) & np.isfinite(x)
        assert np.all(grad[name][~np.isfinite(x)] == 0)
        unit = WIDE(1)
        if name in ("q", "k") and case.variant in ("identity", "relu", "quadratic") and free.any():
            unit = max(np.sqrt(np.mean(x[free] ** 2)), WIDE(1e-3))
        for _ in range(3):
            direction = np.where(free, unit * rng.standard_normal(x.shape).clip(-3, 3), 0)
            terms = grad[name] * direction
            size = np.sqrt((terms**2).sum())
            error = abs(derivative(name, direction) - terms.sum())
            worst = max(worst, float(error / size if size > 0 else error))
        if entries > 320:
            continue
        size = np.max(np.abs(grad[name]))
        for index in np.argwhere(free):
            direction = np.zeros(x.shape, WIDE)
            direction[tuple(index)] = unit
            error = abs(derivative(name, direction) / unit - grad[name][tuple(index)])
            worst = max(worst, float(error / size if size > 0 else error))
    return worst


@dataclasses.dataclass
class Report:
    scalar: float
    fd: float
    f64: float
    f32: float


def verified(case):
    """Expected outputs and gradients of the case, after every check of this script."""
    shift_out = None
    if case.variant == "lln" and case.state is not None:
        shift_out = final_shift(case)
    with np.errstate(all="ignore"):
        out, grad = evaluate(case, WIDE, shift_out=shift_out)
        for name in case.zero:
            size = float(np.max(np.abs(grad[name]), initial=0))
            assert size < 1e-13, f"{case.name}: {name} should vanish, found {size}"
            grad[name] = np.zeros_like(grad[name])
        everything = {**out, **{"grad " + n: x for n, x in grad.items()}}
        for name, x in everything.items():
            assert np.all(np.isfinite(x)), f"{case.name}: {name} is not finite"

        scalar = 0.0
        batch, heads, nq, d = case.q.shape
        if batch * heads * nq * case.k.shape[2] * d < 1000000:
            scalar = relative_error(scalar_forward(case), out["o"])
            assert scalar < 1e-13, f"{case.name}: scalar loops differ by {scalar}"

        whole = case.cu_q is None and case.key_mask is None and not case.dropout_p
        if case.state is not None and case.causal and whole and nq > 1:
            continued(case, out)
        if case.variant == "affine" and case.normalised() and case.small_g != "clamp":
            # a and b together have no effect.
            euler = affine_setting(case, "a") * grad["a"] + affine_setting(case, "b") * grad["b"]
            size = abs(affine_setting(case, "b") * grad["b"]) + WIDE(1)
            assert abs(euler) < 1e-14 * size, f"{case.name}: a da + b db = {euler}"

        rng = np.random.RandomState(zlib.crc32(b"differences " + case.name.encode()))
        fd = finite_differences(case, grad, shift_out, rng)
        assert fd < FD_LIMIT, f"{case.name}: finite differences differ by {fd}"

        worst = {}
        for dtype, limit, grad_limit in (
            (np.float64, 0.1 * RTOL_F64, 0.1 * RTOL_F64),
            (np.float32, 0.25 * case.rtol_f32, 0.25 * case.grad_rtol_f32),
        ):
            low_out, low_grad = evaluate(case, dtype, shift_out=shift_out)
            low = {**low_out, **{"grad " + n: x for n, x in low_grad.items()}}
            errors = {n: relative_error(low[n], x) for n, x in everything.items()}
            for name, error in errors.items():
                assert error < (
                    grad_limit if name.startswith("grad ") else limit
                ), f"{case.name}: {dtype.__name__} loses {error:.1e} in {name}"
            worst[dtype] = max(errors.values())
    if shift_out is not None:
        out["state/shift"] = shift_out
    if case.expected_moments is not None:
        out.update(("moments/" + n, x) for n, x in case.expected_moments.items())
    if case.diagnostics:
        out.update(("diagnostics/" + n, x) for n, x in diagnostics_of(case).items())
    return out, grad, Report(scalar, fd, worst[np.float64], worst[np.float32])


# --------------------------------------------------------------------------------------------------
# Writing


def open_for_writing(path, old_format=False, compressed=False):
    """A new file without time stamps, so that the same content gives the same bytes.

    The index of a dataset in one chunk takes 3 KB in the format of HDF5 1.8 and nothing in that of
    1.10, which compressed files of many small datasets use.
    """
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    if old_format:
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_V18)
    elif compressed:
        access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    else:
        access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    name = os.fsencode(path)
    return h5py.File(h5py.h5f.create(name, h5py.h5f.ACC_TRUNC, creation, access))


def require_group(file, path):
    """The group of that path, made without time stamps where it is missing."""
    group = file
    for part in path.strip("/").split("/"):
        if part not in group:
            creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
            creation.set_obj_track_times(False)
            h5py.h5g.create(group.id, part.encode(), gcpl=creation)
        group = group[part]
    return group


def write_string(target, name, text, form="fixed-nullterm"):
    """A scalar string attribute in one of the forms that other tools write."""
    if form == "variable-utf8":
        target.attrs[name] = text
    elif form == "variable-ascii":
        target.attrs.create(name, text, dtype=h5py.string_dtype("ascii"))
    else:
        pad = {
            "fixed-nullterm": h5py.h5t.STR_NULLTERM,
            "fixed-nullpad": h5py.h5t.STR_NULLPAD,
            "fixed-spacepad": h5py.h5t.STR_SPACEPAD,
        }[form]
        data = text.encode("utf-8")
        fill = b" " if form == "fixed-spacepad" else b"\0"
        # One byte more than the text: the terminator, or one byte of padding.
        kind = h5py.h5t.C_S1.copy()
        kind.set_size(len(data) + 1)
        kind.set_strpad(pad)
        if form == "fixed-nullterm":
            kind.set_cset(h5py.h5t.CSET_UTF8)
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        attribute = h5py.h5a.create(target.id, name.encode(), kind, space)
        attribute.write(np.frombuffer(data + fill, f"S{len(data) + 1}").reshape(()), mtype=kind)


def write_dataset(file, path, data, dtype, chunks=False, compressed=False):
    data = np.asarray(data).astype(dtype)
    options = {"track_times": False}
    if compressed and data.size > 16:
        options.update(chunks=data.shape, shuffle=True, compression=9)
    elif chunks and data.ndim == 4:
        options["chunks"] = data.shape[:-2] + (1 + data.shape[-2] // 2,) + data.shape[-1:]
    group, _, name = path.rpartition("/")
    require_group(file, group).create_dataset(name, data=data, **options)


def write(case, out, grad, path):
    real = np.dtype(case.storage)
    with open_for_writing(path, case.old_format, case.compressed) as file:
        for name, text in (
            ("schema", SCHEMA),
            ("variant", case.variant),
            ("producer", PRODUCER),
            ("description", case.description),
        ):
            write_string(file, name, text, case.strings)
        # Full is the default: lln's files say so, the others leave the attribute out.
        causal = case.causal if case.causal or case.variant in EXPONENTIAL else None
        numbers = {"causal": causal, "normalise": case.normalise, "center_v": case.center_v}
        numbers = {n: int(x) for n, x in numbers.items() if x is not None}
        reals = ("scale", "alpha", "beta", "a", "b", "norm_eps", "g_min", "dropout_p")
        reals = {n: getattr(case, n) for n in reals if getattr(case, n) is not None}
        if case.moments is not None:
            del reals["alpha"], reals["beta"]
        if case.block is not None:
            numbers["block"] = case.block
        counters = {n: getattr(case, n) for n in ("seed", "offset")}
        counters = {n: x for n, x in counters.items() if x is not None}
        choices = ("qk_norm", "small_g", "combine", "moments", "moments_scope")
        choices = {n: getattr(case, n) for n in choices}
        choices = {n: x for n, x in choices.items() if x is not None}
        if numbers or reals or counters or choices:
            config = require_group(file, "config")
            for name, text in choices.items():
                write_string(config, name, text, case.strings)
            for name, value in counters.items():
                config.attrs.create(name, value, dtype="<u8")
            for name, value in numbers.items():
                config.attrs.create(name, value, dtype=case.integers)
            for name, value in reals.items():
                if np.ndim(value):
                    write_dataset(file, "config/" + name, value, real)
                else:
                    config.attrs.create(name, value, dtype=">f8" if real.str[0] == ">" else "<f8")

        def put(path, data, dtype=real):
            if path.endswith("/m"):
                dtype = "<i8"
            write_dataset(file, path, data, dtype, case.chunks, case.compressed)

        for name in "qkv":
            put("inputs/" + name, getattr(case, name))
        if case.key_mask is not None:
            put("inputs/key_mask", case.key_mask, "u1")
        if case.cu_q is not None:
            put("inputs/cu_seqlens_q", case.cu_q, "<i8")
            put("inputs/cu_seqlens_k", case.cu_k, "<i8")
        for name in ("diag_r", "diag_p", "projection"):
            if getattr(case, name) is not None:
                put("inputs/" + name, getattr(case, name))
        put("cotangent/o", case.g)
        if case.state is not None:
            for name, data in case.state.items():
                put("inputs/state/" + name, data)
            for name, data in case.state_g.items():
                put("cotangent/state/" + name, data)
        for name, data in out.items():
            put("expected/" + name, data)
        for name, data in grad.items():
            put("expected_grad/" + name, data)
        if case.rtol_f32 != RTOL_F32:
            file["expected"].attrs.create("rtol_f32", case.rtol_f32, dtype="<f8")
        if case.grad_rtol_f32 != RTOL_F32:
            file["expected_grad"].attrs.create("rtol_f32", case.grad_rtol_f32, dtype="<f8")
        if case.notes_group:
            # Readers ignore groups that they do not know.
            write_dataset(file, "notes/row_numbers", np.arange(case.q.shape[2]), "<i4")


# --------------------------------------------------------------------------------------------------
# The cases


def source(name):
    """A generator whose stream NumPy has frozen, seeded by the file's name."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def away_from_zero(x, margin):
    """Finite differences must not step over relu's kink or elu's jump of second derivative."""
    return np.where(np.abs(x) < margin, np.where(x < 0, -margin, margin), x)


def rounded(x):
    """x to SIGNIFICANT_BITS."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, SIGNIFICANT_BITS)), exponent - SIGNIFICANT_BITS)


def draw(
    name,
    variant,
    description,
    extents,
    spread=1.0,
    positive=False,
    stream=None,
    all_digits=False,
    compress_from=COMPRESS_FROM,
    **options,
):
    """A case with Gaussian inputs; extents = (B, H, Hkv, Nq, Nk, D, Dv)."""
    b, h, hkv, nq, nk, d, dv = extents
    rng = source(stream or name)
    q = spread * rng.standard_normal((b, h, nq, d))
    k = spread * rng.standard_normal((b, hkv, nk, d))
    v = rng.standard_normal((b, hkv, nk, dv))
    g = rng.standard_normal((b, h, nq, dv))
    if positive:
        q, k = np.abs(q) + 0.1, np.abs(k) + 0.1
    if variant in ("elu", "relu"):
        q, k = away_from_zero(q, 0.02), away_from_zero(k, 0.02)
    if options.get("storage", "<f8")[1:] == "f4":
        q, k, v, g = (x.astype(np.float32).astype(np.float64) for x in (q, k, v, g))
    special = any(options.get(n) for n in ("storage", "old_format", "chunks"))
    compressed = sum(x.size for x in (q, k, v, g)) > compress_from and not special
    if compressed and not all_digits:
        q, k, v, g = map(rounded, (q, k, v, g))
    return Case(name, variant, description, q, k, v, g, compressed=compressed, **options)


def draw_affine(name, description, extents, change=None, least=0.25, accept=None, **options):
    """The first draw of a name that is sound; change(case) puts the special in it."""
    for attempt in range(1, 20000):
        stream = name if attempt == 1 else f"{name} {attempt}"
        case = draw(name, "affine", description, extents, stream=stream, **options)
        if change is not None:
            change(case)
        with np.errstate(all="ignore"):
            if affine_is_sound(case, least) and (accept is None or accept(case)):
                return case
    raise AssertionError(f"{name}: no draw is sound")


def affine_state(case, counts, without=()):
    """Gives an affine case the state of that many random keys in each member, and cotangents."""
    rng = source("state of " + case.name)
    members, hkv = len(counts), case.k.shape[1]
    d, dv = case.k.shape[3], case.v.shape[3]
    extents = {"S": (members, hkv, d, dv), "z": (members, hkv, d), "t": (members, hkv, dv)}
    case.state = {n: np.zeros(x) for n, x in extents.items()}
    case.state["m"] = np.array(counts, np.int64)
    for m, count in enumerate(counts):
        for h in range(hkv):
            k, v = rng.standard_normal((count, d)), rng.standard_normal((count, dv))
            k = normalised_rows(case, k)[0]
            case.state["S"][m, h] = k.T @ v
            case.state["z"][m, h], case.state["t"][m, h] = k.sum(axis=0), v.sum(axis=0)
    case.state_g = {n: rng.standard_normal(x) for n, x in extents.items() if n not in without}


def random_state(case, shift=None):
    """Gives the case a random initial state (positive z) and random cotangents of the final one."""
    rng = source("state of " + case.name)
    members = case.q.shape[0] if case.cu_q is None else len(case.cu_q) - 1
    hkv, d, dv = case.k.shape[1], case.k.shape[3], case.v.shape[3]
    case.state = {
        "S": rng.standard_normal((members, hkv, d, dv)),
        "z": 0.5 + np.abs(rng.standard_normal((members, hkv, d))),
    }
    if shift is not None:
        case.state["shift"] = rng.randint(-shift, shift + 1, (members, hkv, d)).astype(np.float64)
    case.state_g = {
        "S": rng.standard_normal((members, hkv, d, dv)),
        "z": rng.standard_normal((members, hkv, d)),
    }
    if case.compressed:
        for of in (case.state, case.state_g):
            of.update((n, rounded(x)) for n, x in of.items())
    return case


def foundation_cases():
    # --- shapes: every extent differs from every other where the name says cross
    yield draw(
        "identity_full_cross_defaults",
        "identity",
        "no /config group: full mask, unnormalised, scale 1; all extents differ",
        (1, 6, 3, 7, 9, 4, 5),
        strings="variable-utf8",
        old_format=True,
    )
    yield draw(
        "identity_causal_gqa_scale_n65",
        "identity",
        "unnormalised with scale 0.5; one row more than 64",
        (1, 2, 1, 65, 65, 3, 2),
        causal=True,
        scale=0.5,
    )
    yield draw(
        "identity_causal_mqa_negative_scale_cross",
        "identity",
        "unnormalised with scale -2, one key/value head, normalise = 0 written out",
        (1, 3, 1, 17, 33, 4, 6),
        causal=True,
        scale=-2.0,
        normalise=False,
    )
    yield draw(
        "identity_causal_normalised_positive",
        "identity",
        "normalise = 1 with positive features: the gradient through sum k of the denominator",
        (1, 2, 1, 32, 32, 6, 4),
        positive=True,
        causal=True,
        normalise=True,
    )
    yield draw(
        "identity_full_normalised_scale_ignored",
        "identity",
        "scale -2 has no effect on a normalised output",
        (2, 2, 1, 13, 37, 6, 4),
        positive=True,
        normalise=True,
        scale=-2.0,
    )

    yield draw(
        "elu_full_gqa_cross_n37_n53", "elu", "GQA, Nq != Nk, D != Dv", (1, 2, 1, 37, 53, 3, 5)
    )
    yield draw(
        "elu_full_defaults_n17",
        "elu",
        "no /config group: full mask, normalised",
        (1, 2, 1, 17, 17, 4, 5),
        strings="variable-utf8",
    )
    yield draw(
        "elu_causal_gqa_n130",
        "elu",
        "two rows more than 128",
        (1, 2, 1, 130, 130, 3, 2),
        causal=True,
    )
    yield draw(
        "elu_causal_mqa_cross_n17_n65",
        "elu",
        "one key/value head; query i sees keys up to i + 48",
        (1, 4, 1, 17, 65, 3, 5),
        causal=True,
    )
    yield draw(
        "elu_causal_one_query_n5",
        "elu",
        "bottom-right alignment: the only query sees all five keys",
        (2, 2, 1, 1, 5, 4, 3),
        causal=True,
    )
    yield draw(
        "elu_causal_n1",
        "elu",
        "one token: o = v, dq = dk = 0",
        (2, 4, 2, 1, 1, 5, 3),
        causal=True,
        zero=("q", "k"),
    )
    yield draw("elu_causal_n64", "elu", "exactly 64 rows", (1, 2, 2, 64, 64, 3, 2), causal=True)
    yield draw(
        "elu_full_unnormalised_scale",
        "elu",
        "normalise = 0, scale 0.5",
        (1, 4, 2, 15, 31, 4, 6),
        normalise=False,
        scale=0.5,
    )
    yield draw(
        "elu_causal_unnormalised_negative_scale",
        "elu",
        "normalise = 0, scale -2",
        (1, 4, 2, 33, 33, 4, 3),
        causal=True,
        normalise=False,
        scale=-2.0,
    )
    yield draw(
        "elu_causal_d1_dv1",
        "elu",
        "one feature: all weights differ by the key only",
        (3, 2, 1, 21, 21, 1, 1),
        causal=True,
        zero=("q",),
    )
    yield draw(
        "elu_causal_d192_dv4",
        "elu",
        "wide features, few values",
        (1, 2, 1, 3, 5, 192, 4),
        causal=True,
    )
    yield draw("elu_full_d20_dv96", "elu", "more values than features", (1, 2, 1, 4, 9, 20, 96))

    yield draw(
        "relu_full_gqa_cross_n16_n49", "relu", "GQA, Nq != Nk, D != Dv", (2, 4, 2, 16, 49, 3, 5)
    )
    yield draw(
        "relu_causal_gqa_n67",
        "relu",
        "early causal rows have denominators of exactly 0",
        (1, 4, 2, 67, 67, 3, 2),
        causal=True,
    )
    yield draw(
        "relu_causal_unnormalised_cross",
        "relu",
        "normalise = 0, default scale",
        (2, 2, 1, 20, 34, 4, 3),
        causal=True,
        normalise=False,
    )
    yield draw(
        "quadratic_full_gqa_cross_n31_n47",
        "quadratic",
        "GQA, Nq != Nk, D != Dv",
        (1, 4, 2, 31, 47, 5, 3),
    )
    yield draw(
        "quadratic_causal_mqa_n66",
        "quadratic",
        "one key/value head",
        (1, 3, 1, 66, 66, 4, 5),
        causal=True,
    )
    yield draw(
        "quadratic_causal_unnormalised_scale",
        "quadratic",
        "normalise = 0, scale 0.5",
        (2, 2, 2, 18, 32, 3, 4),
        causal=True,
        normalise=False,
        scale=0.5,
    )
    yield draw(
        "quadratic_full_d65_dv33",
        "quadratic",
        "one more than a power of two, both extents",
        (1, 2, 1, 6, 11, 65, 33),
    )

    yield draw(
        "lln_full_gqa_cross_n23_n31",
        "lln",
        "attributes alpha and beta; all extents differ",
        (1, 6, 3, 23, 31, 5, 7),
        alpha=1.25,
        beta=0.8,
    )
    yield draw(
        "lln_causal_gqa_per_head_n130",
        "lln",
        "alpha and beta as datasets, one per head",
        (1, 6, 2, 130, 130, 2, 3),
        causal=True,
        alpha=np.array([0.6, 0.9, 1.2, 1.5, 1.8, 2.1]),
        beta=np.array([1.7, 0.7]),
    )
    yield draw(
        "lln_causal_gqa_cross_n23_n87",
        "lln",
        "alpha per head, beta for all heads",
        (1, 4, 2, 23, 87, 3, 5),
        causal=True,
        alpha=np.array([0.5, 1.0, 1.5, 2.0]),
        beta=1.1,
    )
    yield draw(
        "lln_full_mqa_cross_n34_n14",
        "lln",
        "alpha for all heads, beta per head (one)",
        (2, 3, 1, 34, 14, 6, 4),
        alpha=0.9,
        beta=np.array([1.3]),
    )
    yield draw(
        "lln_causal_n1",
        "lln",
        "one token: o = v, every other gradient 0",
        (2, 4, 2, 1, 1, 5, 3),
        causal=True,
        alpha=1.2,
        beta=0.7,
        zero=("q", "k", "alpha", "beta"),
    )
    yield draw(
        "lln_causal_n16",
        "lln",
        "exactly 16 rows",
        (2, 2, 1, 16, 16, 3, 4),
        causal=True,
        alpha=2.0,
        beta=2.0,
    )
    yield draw(
        "lln_causal_n65",
        "lln",
        "one row more than 64",
        (1, 2, 1, 65, 65, 3, 2),
        causal=True,
        old_format=True,
        alpha=1.4,
        beta=1.6,
    )
    yield draw(
        "lln_full_unnormalised_negative_scale",
        "lln",
        "normalise = 0, scale -2",
        (1, 4, 2, 12, 29, 5, 3),
        normalise=False,
        scale=-2.0,
        alpha=0.8,
        beta=0.5,
    )
    yield draw(
        "lln_causal_unnormalised_scale_per_head",
        "lln",
        "normalise = 0, scale 0.5",
        (1, 4, 2, 33, 48, 3, 5),
        causal=True,
        normalise=False,
        scale=0.5,
        alpha=np.array([0.4, 0.6, 0.8, 1.0]),
        beta=np.array([0.9, 0.3]),
    )
    yield draw(
        "lln_full_zero_and_negative_parameters",
        "lln",
        "alpha 0 and alpha, beta below 0: d alpha must not be formed by dividing by alpha",
        (2, 3, 3, 10, 22, 4, 5),
        alpha=np.array([0.0, -0.7, 1.3]),
        beta=np.array([1.1, -0.4, 0.0]),
    )
    yield draw(
        "lln_causal_alpha_beta_zero",
        "lln",
        "alpha = beta = 0: running means; dq = dk = 0 and d alpha = 0, but d beta is not",
        (2, 2, 1, 19, 19, 3, 4),
        causal=True,
        alpha=0.0,
        beta=0.0,
        zero=("q", "k", "alpha"),
    )
    yield draw(
        "lln_full_d64_dv33",
        "lln",
        "a usual head dimension",
        (1, 2, 1, 5, 7, 64, 33),
        alpha=2.1,
        beta=2.0,
    )
    yield draw(
        "lln_causal_d33_dv65",
        "lln",
        "odd tiles in both directions",
        (1, 1, 1, 8, 10, 33, 65),
        causal=True,
        alpha=1.7,
        beta=1.9,
    )

    # --- empty extents
    yield draw(
        "elu_full_nk0",
        "elu",
        "no keys: o = 0, dq = 0, empty dk and dv",
        (2, 4, 2, 6, 0, 3, 5),
        zero=("q",),
    )
    yield draw(
        "lln_full_nk0",
        "lln",
        "no keys: o = 0, every gradient 0",
        (2, 4, 2, 6, 0, 3, 5),
        alpha=1.1,
        beta=0.9,
        zero=("q", "alpha", "beta"),
    )
    yield draw(
        "identity_full_nk0",
        "identity",
        "no keys, unnormalised: an empty sum",
        (1, 2, 1, 4, 0, 5, 3),
        scale=0.5,
        zero=("q",),
    )
    yield draw(
        "elu_causal_nq0",
        "elu",
        "no queries: empty o and dq, dk = dv = 0",
        (2, 2, 1, 0, 7, 3, 4),
        causal=True,
        zero=("k", "v"),
    )
    yield draw(
        "lln_full_nq0",
        "lln",
        "no queries: empty o and dq, every other gradient 0",
        (1, 2, 1, 0, 7, 3, 4),
        alpha=1.1,
        beta=0.9,
        zero=("k", "v", "alpha", "beta"),
    )
    yield draw(
        "lln_causal_n0",
        "lln",
        "no tokens",
        (1, 2, 1, 0, 0, 3, 4),
        causal=True,
        alpha=np.array([1.1, 0.9]),
        beta=0.9,
        zero=("alpha", "beta"),
    )
    yield draw("quadratic_causal_n0", "quadratic", "no tokens", (2, 2, 1, 0, 0, 3, 4), causal=True)
    yield draw("relu_full_b0", "relu", "no batch entries", (0, 2, 1, 5, 6, 3, 4))

    # --- hazards
    for mask in ("full", "causal"):
        case = draw(
            f"relu_{mask}_zero_denominator",
            "relu",
            "rows without a positive feature, and rows whose features meet none of the keys' "
            "visible to them: o = 0 and no gradient from these rows",
            (2, 4, 2, 12, 18, 4, 3),
            causal=mask == "causal",
        )
        q, k = case.q, case.k
        k[:, :, :, 3] = -np.abs(k[:, :, :, 3])  # feature 3 is dead in every key
        q[:, :, 2] = -np.abs(q[:, :, 2])  # no feature at all
        q[:, :, 7, :3] = -np.abs(q[:, :, 7, :3])  # only the dead feature
        q[:, :, 7, 3] = np.abs(q[:, :, 7, 3])
        k[:, 1, :9] = -np.abs(k[:, 1, :9])  # causal: the second head's first queries see no feature
        yield case
    case = draw(
        "relu_causal_exact_zeros",
        "relu",
        "inputs of exactly 0 and -0: phi'(0) = 0",
        (2, 2, 1, 14, 14, 4, 3),
        causal=True,
    )
    for name in "qk":
        x = getattr(case, name)
        x[:, :, 3::4, 1], x[:, :, ::5, 2] = 0.0, -0.0
        case.still[name] = x == 0
    yield case
    case = draw(
        "elu_full_exact_zeros",
        "elu",
        "inputs of exactly 0 and -0: phi(0) = phi'(0) = 1",
        (2, 2, 1, 14, 9, 4, 3),
    )
    for name in "qk":
        x = getattr(case, name)
        x[:, :, 3::4, 1], x[:, :, ::5, 2] = 0.0, -0.0
        case.still[name] = x == 0  # the second derivative jumps there
    yield case
    for variant in ("identity", "quadratic"):
        case = draw(
            f"{variant}_causal_normalised_zero_query",
            variant,
            "queries of exactly 0 have the denominator 0: o = 0 and no gradient",
            (2, 2, 1, 17, 20, 3, 4),
            positive=True,
            causal=True,
            normalise=True,
        )
        case.q[:, :, 4] = case.q[:, 1:, 11] = 0.0
        case.still["q"] = case.q == 0  # the output jumps there
        yield case
    case = draw(
        "identity_causal_normalised_large",
        "identity",
        "q and k of 1e15: the products reach 1e30 and more before the ratio is formed",
        (1, 2, 1, 40, 40, 4, 3),
        positive=True,
        causal=True,
        normalise=True,
    )
    case.q, case.k = case.q * 1e15, case.k * 1e15
    yield case
    case = draw(
        "quadratic_full_large",
        "quadratic",
        "q and k of 1e6: weights of 1e24",
        (2, 2, 1, 9, 27, 4, 3),
    )
    case.q, case.k = case.q * 1e6, case.k * 1e6
    yield case
    case = draw(
        "quadratic_causal_small",
        "quadratic",
        "q and k of 1e-4: weights of 1e-16",
        (1, 2, 1, 27, 33, 4, 3),
        causal=True,
    )
    case.q, case.k = case.q * 1e-4, case.k * 1e-4
    yield case
    case = draw(
        "identity_full_n1_digits",
        "identity",
        "q = k = 0, 1, ..., 9 and v = 1: the weight is 285",
        (1, 1, 1, 1, 1, 10, 1),
    )
    case.q[:] = case.k[:] = np.arange(10.0)
    case.v[:] = 1.0
    yield case
    case = draw(
        "identity_full_normalised_n1_digits",
        "identity",
        "q = k = 0, 1, ..., 9 and v = 1, normalised: o = 1",
        (1, 1, 1, 1, 1, 10, 1),
        normalise=True,
        zero=("q", "k"),
    )
    case.q[:] = case.k[:] = np.arange(10.0)
    case.v[:] = 1.0
    yield case
    for variant, mask, extra in (
        ("elu", "causal", {}),
        ("elu", "full", {}),
        ("lln", "causal", {"alpha": 1.3, "beta": 0.9}),
        ("lln", "full", {"alpha": 0.9, "beta": 1.3}),
    ):
        case = draw(
            f"{variant}_{mask}_constant_values",
            variant,
            "values constant per column: o = v and dq = dk = 0",
            (1, 4, 2, 21, 35, 3, 5),
            causal=mask == "causal",
            zero=("q", "k") + tuple(extra),
            all_digits=True,  # compresses well as it is
            **extra,
        )
        case.v[:] = case.v[:, :, :1]
        yield case

    # The inputs of the next ones are rounded to fp32, so that a fp32 run starts from the same
    # exponents: at |alpha q + beta k| = 100 the rounding of an input alone costs 6e-6 of a weight.
    # They are not rounded further, so that nothing changes of the fp32 tolerances argued here.
    def exact_in_f32(case):
        for name in "qkvg":
            x = getattr(case, name)
            x[:] = x.astype(np.float32)
        return case

    case = draw(
        "lln_causal_key_at_110",
        "lln",
        "one key entry at 110 inside a chunk: earlier rows must not notice, later ones give "
        "its value",
        (1, 2, 1, 50, 50, 4, 3),
        spread=0.5,
        causal=True,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
    )
    case.k[0, 0, 21, 2] = 110.0
    yield exact_in_f32(case)
    case = draw(
        "lln_full_key_at_110",
        "lln",
        "one key entry at 110",
        (1, 2, 1, 12, 50, 4, 3),
        spread=0.5,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
        # d beta = sum k dk contains 110 (G.v + e), where G.v and e are about 2 and cancel. In fp32 each is
        # a sum over 12 queries and 3 values in one order or another, off by up to 15 * 2^-24 of 2: their
        # difference by up to 3.6e-6, d beta by 110 times that, 2.8e-3 of its 0.143; less than half is seen.
        grad_rtol_f32=1e-3,
    )
    case.k[0, 0, 21, 2] = 110.0
    # Only the queries whose share of that entry is small see anything else: let two of them.
    case.q[0, 0, 3, 2] = case.q[0, 1, 8, 2] = -112.0
    yield exact_in_f32(case)
    case = draw(
        "lln_causal_key_at_89_n16",
        "lln",
        "one key entry at 89, values 0 ... 15: fp32 exp overflows at 88.72",
        (1, 1, 1, 16, 16, 3, 1),
        spread=0.5,
        causal=True,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
        # d beta = sum k dk contains 89 (G.v + e), where G.v and e are up to 15 |G| and cancel: in fp32
        # their difference is off by up to 15 * 2^-24, 89 times that is 8e-5, and d beta is 0.09.
        grad_rtol_f32=1e-3,
    )
    case.k[0, 0, 6, 1] = 89.0
    case.v[0, 0, :, 0] = np.arange(16.0)
    yield exact_in_f32(case)
    for mask in ("full", "causal"):
        case = draw(
            f"lln_{mask}_channel_offset",
            "lln",
            "one key channel at +50 while the queries point away from it (-60): without a "
            "shift per feature every other feature underflows",
            (1, 2, 1, 41, 41, 5, 3),
            spread=0.7,
            causal=mask == "causal",
            alpha=1.0,
            beta=1.0,
            all_digits=True,
        )
        case.k[:, :, :, 1] += 50.0
        case.q[:, :, :, 1] -= 60.0
        yield exact_in_f32(case)
    case = draw(
        "lln_causal_rising_and_falling_keys",
        "lln",
        "one channel rises by half a nat per token, one falls: every chunk moves the shift",
        (1, 2, 1, 97, 97, 4, 3),
        spread=0.6,
        causal=True,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
    )
    ramp = 0.5 * np.arange(97.0)
    case.k[:, :, :, 0] += ramp
    case.k[:, :, :, 3] -= ramp
    yield exact_in_f32(case)
    case = draw(
        "lln_causal_broad_n257",
        "lln",
        "standard deviation 8; one row more than 256",
        (1, 1, 1, 257, 257, 3, 2),
        spread=8.0,
        causal=True,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
        # Exponents of size 25 log2(e) cost up to 2e-6 of a weight in fp32, and d alpha and
        # d beta are sums of terms q dq, k dk of both signs, 10 to 20 times their sum.
        grad_rtol_f32=1e-4,
    )
    yield exact_in_f32(case)
    case = draw(
        "lln_full_keys_near_minus_110",
        "lln",
        "keys near -110: their fp32 exponentials are 0, the ratio is not",
        (1, 2, 1, 9, 24, 3, 4),
        spread=0.5,
        alpha=1.0,
        beta=1.0,
        all_digits=True,
        # Rounding an exponent of 110 log2(e) to fp32 costs up to 5e-6 of a weight, and
        # d beta = sum k dk loses two digits more, since sum dk = 0 and all k are near -110.
        grad_rtol_f32=4e-4,
    )
    case.k -= 110.0
    yield exact_in_f32(case)

    # --- storage written by other tools
    yield draw(
        "elu_causal_float32",
        "elu",
        "stored as float32; strings of fixed length, null padded",
        (2, 2, 1, 35, 35, 4, 3),
        causal=True,
        storage="<f4",
        strings="fixed-nullpad",
        integers="<i4",
    )
    yield draw(
        "lln_full_float32",
        "lln",
        "stored as float32; variable-length ASCII strings",
        (2, 4, 2, 14, 27, 3, 5),
        alpha=1.25,
        beta=np.array([0.5, 1.5]),
        storage="<f4",
        strings="variable-ascii",
        integers="|u1",
    )
    yield draw(
        "elu_full_bigendian",
        "elu",
        "big-endian float64; null-terminated UTF-8 strings",
        (2, 2, 1, 13, 18, 4, 3),
        normalise=True,
        storage=">f8",
        strings="fixed-nullterm",
        integers=">i4",
    )
    yield draw(
        "lln_causal_bigendian",
        "lln",
        "big-endian float64, parameters too",
        (1, 4, 2, 19, 26, 3, 4),
        causal=True,
        alpha=1.5,
        beta=np.array([0.75, 1.25]),
        storage=">f8",
        strings="fixed-spacepad",
        integers=">i8",
    )
    yield draw(
        "quadratic_causal_bigendian_float32",
        "quadratic",
        "big-endian float32",
        (2, 2, 1, 18, 18, 3, 5),
        causal=True,
        storage=">f4",
        strings="fixed-nullterm",
        integers="|i1",
    )
    yield draw(
        "relu_full_chunked_extra_group",
        "relu",
        "chunked datasets without a filter, and a group that readers do not know",
        (1, 4, 2, 9, 22, 5, 3),
        chunks=True,
        notes_group=True,
        integers="<u2",
    )


def extended_cases():
    """Key masks, packed sequences and states: what the first engine may not handle."""
    case = draw(
        "elu_full_key_mask",
        "elu",
        "hidden keys of every batch entry, NaN in k and v there",
        (3, 4, 2, 11, 23, 4, 5),
    )
    case.key_mask = (source("mask of " + case.name).uniform(size=(3, 23)) < 0.7).astype(np.uint8)
    yield poisoned(case)
    case = draw(
        "elu_causal_left_padding",
        "elu",
        "left padding, NaN there: the first rows see no key, o = 0",
        (2, 2, 1, 19, 19, 4, 3),
        causal=True,
    )
    case.key_mask = np.ones((2, 19), np.uint8)
    case.key_mask[0, :7] = case.key_mask[1, :2] = 0
    yield poisoned(case)
    case = draw(
        "elu_causal_key_mask_b1",
        "elu",
        "a mask with one batch entry",
        (1, 2, 1, 17, 40, 3, 4),
        causal=True,
    )
    case.key_mask = np.ones((1, 40), np.uint8)
    case.key_mask[0, [0, 5, 6, 31, 39]] = 0
    yield poisoned(case)
    case = draw(
        "lln_causal_key_mask_huge",
        "lln",
        "hidden keys at 300 must stay out of the shift; one batch entry is hidden as a whole",
        (2, 4, 2, 26, 33, 3, 5),
        causal=True,
        alpha=1.1,
        beta=1.3,
    )
    case.key_mask = np.ones((2, 33), np.uint8)
    case.key_mask[0, 3::5] = 0
    case.key_mask[1] = 0
    case.k[0, :, 3::5] = case.k[1] = 300.0
    for name in "kv":
        case.still[name] = np.broadcast_to(
            case.key_mask[:, None, :, None] == 0, getattr(case, name).shape
        )
    yield case

    case = draw(
        "elu_causal_packed",
        "elu",
        "members of 1, 0, 17, 16, 5 tokens: borders inside a chunk",
        (1, 4, 2, 39, 39, 3, 5),
        causal=True,
    )
    case.cu_q = case.cu_k = np.array([0, 1, 1, 18, 34, 39])
    yield case
    case = draw(
        "quadratic_causal_packed_cross",
        "quadratic",
        "members with fewer queries than keys",
        (1, 2, 1, 20, 37, 4, 3),
        causal=True,
    )
    case.cu_q, case.cu_k = np.array([0, 3, 13, 13, 20]), np.array([0, 9, 19, 24, 37])
    case.k[0, :, 19:24] = case.v[0, :, 19:24] = np.nan  # a member without queries
    yield case
    case = draw(
        "lln_full_packed_cross",
        "lln",
        "a member without keys (o = 0) and one without queries (NaN in its keys)",
        (1, 4, 2, 22, 30, 3, 4),
        alpha=np.array([0.5, 1.0, 1.5, 2.0]),
        beta=np.array([1.2, 0.8]),
    )
    case.cu_q, case.cu_k = np.array([0, 8, 12, 12, 22]), np.array([0, 11, 11, 16, 30])
    case.k[0, :, 11:16] = case.v[0, :, 11:16] = np.nan
    yield case

    yield random_state(
        draw(
            "elu_causal_state_gqa",
            "elu",
            "random initial state, GQA",
            (1, 4, 2, 35, 35, 3, 5),
            causal=True,
        )
    )
    yield random_state(
        draw(
            "elu_full_state_cross",
            "elu",
            "every query sees the state and all keys",
            (2, 2, 1, 9, 21, 4, 3),
        )
    )
    for n in (1, 2):
        yield random_state(
            draw(
                f"identity_causal_state_n{n}",
                "identity",
                "a piece shorter than any chunk: the part of dS that passes through",
                (2, 2, 1, n, n, 4, 3),
                causal=True,
                scale=0.5,
            )
        )
    yield random_state(
        draw(
            "lln_causal_state_per_head",
            "lln",
            "state at its own base-2 exponents; cotangents and gradients of S and z "
            "belong to the exponents stored beside them",
            (2, 4, 2, 29, 29, 3, 4),
            causal=True,
            alpha=np.array([0.5, 1.0, 1.5, 2.0]),
            beta=np.array([1.2, 0.8]),
        ),
        shift=3,
    )
    case = draw(
        "elu_causal_packed_state",
        "elu",
        "one state per member; the state of an empty member passes through unchanged",
        (1, 2, 1, 26, 26, 3, 4),
        causal=True,
    )
    case.cu_q = case.cu_k = np.array([0, 4, 4, 21, 26])
    yield random_state(case)


def affine_cases():
    yield draw_affine(
        "affine_full_defaults",
        "no /config group: full mask, q and k over their L2 norms, a = b = scale = 1",
        (2, 4, 2, 5, 7, 3, 6),
    )
    yield draw_affine(
        "affine_causal_l2_gqa_n65",
        "one row more than 64; norm_eps large enough to be felt",
        (1, 4, 2, 65, 65, 3, 2),
        causal=True,
        qk_norm="l2",
        norm_eps=0.0625,
        a=0.75,
        b=1.25,
    )
    yield draw_affine(
        "affine_causal_none_negative_weights",
        "weights of both signs and sums of both signs, no sum near 0",
        (1, 2, 1, 13, 13, 5, 3),
        causal=True,
        qk_norm="none",
        a=1.5,
        b=0.75,
        least=0.1,
        accept=signs_mixed,
    )

    def ties(case):
        # Squares of 25 without rounding: two keys tie for the largest norm, and no query has one.
        case.k[0, 0, 2], case.k[0, 0, 7] = (3, 0, -4, 0, 0, 0), (0, 0, 0, 0, 5, 0)
        case.q[1, 2] = 0
        # One of the two carries the gradient, so neither may move; nor may queries leave 0.
        case.still = {"k": np.zeros(case.k.shape, bool), "q": np.zeros(case.q.shape, bool)}
        case.still["k"][0, 0, [2, 7]] = case.still["q"][1, 2] = True

    yield draw_affine(
        "affine_full_max_cross",
        "largest norms: of two equal keys the first carries the gradient, and a head of queries "
        "that are all 0 is divided by 1",
        (2, 4, 2, 5, 8, 6, 3),
        ties,
        qk_norm="max",
        a=1.25,
        b=1.5,
    )
    yield draw_affine(
        "affine_causal_cross_n17_n40",
        "one key/value head; query i sees keys up to i + 23",
        (1, 3, 1, 17, 40, 4, 5),
        causal=True,
        scale=0.75,
    )
    yield draw_affine(
        "affine_causal_dropout",
        "dropout, seed and offset above 2^32, Dv not a multiple of 4: groups of four normals go "
        "across rows, heads and batch entries",
        (2, 3, 1, 6, 6, 4, 5),
        causal=True,
        dropout_p=0.3,
        seed=0x9E3779B97F4A7C15,
        offset=0x123456789AB,
    )
    yield draw_affine(
        "affine_full_dropout_gqa_scale",
        "dropout of other settings than the defaults: GQA, no norms, scale and a",
        (1, 4, 2, 7, 10, 3, 6),
        qk_norm="none",
        scale=-0.25,
        a=0.5,
        b=1.25,
        dropout_p=0.5,
        seed=7,
        offset=3,
        strings="variable-utf8",
    )

    def clamped(case):
        # Sums of exactly 0 in any order of summation: one weight of 0; weights 1 and -1.
        case.k[0, 0, :2] = (1, 1, 0, 0), (0, 0, 1, 1)
        case.q[0, 0, 0], case.q[0, 1, 1] = (-1, -1, 0, 0), (1, -1, -2, -2)
        case.held = np.zeros(case.q.shape[:3], bool)
        case.held[0, 0, 0] = case.held[0, 1, 1] = True

    yield draw_affine(
        "affine_causal_clamp",
        "small_g = clamp with g_min = 0.3 for each key: sums of either sign are replaced, and two "
        "that are exactly 0",
        (1, 2, 1, 16, 16, 4, 3),
        clamped,
        spread=1.3,
        causal=True,
        qk_norm="none",
        small_g="clamp",
        g_min=0.3,
    )

    def vanishing(case):
        # Small multiples of 1/8: the first feature sums to 2, and 9 keys of weight 1 - 9 k_0 / 2
        # have a sum of exactly 0, in any order of summation and in any of the types.
        case.k[:] = np.rint(8 * case.k) / 8
        case.k[:, :, -1, 0] += 2 - case.k[:, :, :, 0].sum(axis=2)
        case.held = np.zeros(case.q.shape[:3], bool)
        case.held[:, :, 2] = case.held[:, 1, 4] = True
        case.q[case.held] = (-9, 0, 0, 0)

    yield draw_affine(
        "affine_full_zero_denominator",
        "small_g = ignore, rows whose sum is exactly 0: o = 0 and no gradient from these rows",
        (2, 2, 1, 6, 9, 4, 3),
        vanishing,
        qk_norm="none",
        small_g="ignore",
    )

    def offset_values(case):
        case.v += 100
        for name in "qkvg":
            x = getattr(case, name)
            x[:] = x.astype(np.float32)

    yield draw_affine(
        "affine_causal_center_v",
        "values around 100, center_v = 1: without it fp32 loses two digits of gradients; all "
        "inputs are fp32 numbers",
        (1, 2, 1, 20, 20, 3, 4),
        offset_values,
        causal=True,
        center_v=True,
    )
    yield draw_affine(
        "affine_full_unnormalised",
        "normalise = 0: o = sum w v, and scale is that of the scores",
        (1, 4, 2, 6, 9, 5, 3),
        normalise=False,
        scale=0.5,
        a=1.5,
        b=0.25,
    )

    def ones(case):
        case.v[:] = 1

    yield draw_affine(
        "affine_causal_constant_values",
        "v = 1: o = 1, and every gradient but dv is 0",
        (1, 4, 2, 9, 12, 3, 5),
        ones,
        causal=True,
        zero=("q", "k", "a", "b", "scale"),
    )
    yield draw_affine(
        "affine_full_nk0",
        "no keys: o = 0, every gradient 0",
        (2, 4, 2, 6, 0, 3, 5),
        zero=("q", "a", "b", "scale"),
    )
    yield draw_affine(
        "affine_causal_a0",
        "a = 0: running means, whatever b; every gradient but da and dv is 0",
        (2, 2, 1, 9, 9, 3, 4),
        causal=True,
        a=0.0,
        b=2.0,
        zero=("q", "k", "b", "scale"),
    )
    yield draw_affine(
        "affine_full_b0_positive",
        "b = 0 with positive q and k: a and scale have no effect, b has",
        (1, 2, 1, 12, 16, 5, 4),
        positive=True,
        a=1.5,
        b=0.0,
        zero=("a", "scale"),
    )


def signs_mixed(case):
    facts = {}
    evaluate_affine(case, np.float64, facts=facts)
    return 0.2 < np.mean(facts["negative"]) < 0.5 and max(facts["kappa"]) < 8


def extended_affine_cases():
    def masked(case):
        case.key_mask = np.ones((2, 12), np.uint8)
        case.key_mask[0, [1, 6]] = case.key_mask[1, [0, 4, 5, 11]] = 0
        poisoned(case)
        case.k[0, :, 6], case.v[0, :, 6] = 40.0, 1.0
        case.still = {
            n: np.broadcast_to(case.key_mask[:, None, :, None] == 0, getattr(case, n).shape)
            for n in "kv"
        }

    yield draw_affine(
        "affine_full_max_mask",
        "a hidden key has the largest norm of all and must not count; NaN in the other hidden keys",
        (2, 2, 1, 8, 12, 4, 3),
        masked,
        qk_norm="max",
    )

    def padded(case):
        case.key_mask = np.ones((2, 13), np.uint8)
        case.key_mask[0, :5] = case.key_mask[1, :2] = 0
        poisoned(case)

    yield draw_affine(
        "affine_causal_left_padding",
        "left padding, NaN there: the first rows see no key, o = 0, and m counts visible keys only",
        (2, 2, 1, 13, 13, 4, 3),
        padded,
        causal=True,
        b=1.5,
    )
    yield draw_affine(
        "affine_causal_state_gqa",
        "initial state of 6 keys, GQA; cotangents of the final S, z and t",
        (1, 4, 2, 17, 17, 3, 5),
        lambda case: affine_state(case, [6]),
        causal=True,
        a=1.25,
        b=1.75,
    )

    def masked_state(case):
        case.key_mask = np.ones((2, 15), np.uint8)
        case.key_mask[0, [0, 7, 8, 14]] = 0
        case.key_mask[1, :8] = 0
        poisoned(case)
        affine_state(case, [5, 0])

    yield draw_affine(
        "affine_causal_state_mask",
        "states of 5 keys and of none; in the second entry the first rows see no key at all, "
        "o = 0; the final m counts visible keys",
        (2, 2, 1, 9, 15, 4, 3),
        masked_state,
        causal=True,
    )

    def packed(case):
        case.cu_q = case.cu_k = np.array([0, 4, 4, 18, 21])
        affine_state(case, [7, 3, 0, 4])

    yield draw_affine(
        "affine_causal_packed_state_dropout",
        "one state per member, one of them of no keys; the state of an empty member passes "
        "through; the noise counts rows of the whole tensor",
        (1, 2, 1, 21, 21, 3, 5),
        packed,
        causal=True,
        dropout_p=0.25,
        seed=11,
        offset=1 << 40,
    )
    yield draw_affine(
        "affine_full_state_cross",
        "every query sees the states, of 4 and 9 keys, and all keys; no norms; the final z has no "
        "cotangent",
        (2, 2, 1, 7, 12, 4, 3),
        lambda case: affine_state(case, [4, 9], without="z"),
        spread=0.7,
        qk_norm="none",
        b=1.5,
    )


def poisoned(case):
    """NaN in every hidden key and value."""
    hidden = np.broadcast_to(case.key_mask[:, None, :, None] == 0, case.k.shape)
    case.k = np.where(hidden, np.nan, case.k)
    hidden = np.broadcast_to(case.key_mask[:, None, :, None] == 0, case.v.shape)
    case.v = np.where(hidden, np.nan, case.v)
    return case


def compact(*arguments, **options):
    """A case whose file is small however few numbers it has."""
    return draw(*arguments, compress_from=0, **options)


def sound(case):
    """The case with the first cotangent for which fp32 can be asked for the results.

    A gradient that is one number, or has a few, may be small beside the terms it is the sum of.
    """
    for attempt in range(1, 200):
        with np.errstate(all="ignore"):
            out, grad = evaluate(case, WIDE)
            low_out, low_grad = evaluate(case, np.float32)
        # Those of few numbers with room for implementations that add in another order.
        share = {"alpha": 0.02, "beta": 0.02}
        fine = all(relative_error(low_out[n], x) < 0.2 * case.rtol_f32 for n, x in out.items())
        if fine and all(
            n in case.zero
            or relative_error(low_grad[n], x) < share.get(n, 0.2) * case.grad_rtol_f32
            for n, x in grad.items()
        ):
            return case
        g = source(f"cotangent {attempt} of {case.name}").standard_normal(case.g.shape)
        if case.storage[1:] == "f4":
            g = g.astype(np.float32).astype(np.float64)
        case.g = rounded(g) if case.compressed else g
    raise AssertionError(f"{case.name}: no cotangent is sound")


def random_factors(case, names="rp"):
    """Gives a case of LLN+Diag random r and p, or one of them."""
    rng = source("factors of " + case.name)
    extents = (case.q.shape[1], case.v.shape[3])
    for name in names:
        setattr(case, "diag_" + name, rng.uniform(-0.5, 1.5, extents))
    return case


def diag_cases():
    yield compact(
        "lln_diag_full_defaults_n13",
        "lln-diag",
        "block = D = 4 and average by default; the last block has one row",
        (2, 2, 2, 13, 13, 4, 3),
        alpha=1.3,
        beta=0.9,
    )
    yield compact(
        "lln_diag_causal_gqa_per_head_n34",
        "lln-diag",
        "block = D = 5, the last block has four rows; alpha and beta as datasets",
        (1, 4, 2, 34, 34, 5, 3),
        causal=True,
        combine="average",
        alpha=np.array([0.5, 0.9, 1.4, 1.8]),
        beta=np.array([1.5, 0.7]),
    )
    yield compact(
        "lln_diag_causal_d32_n33",
        "lln-diag",
        "one row more than a block of D = 32",
        (1, 1, 1, 33, 33, 32, 1),
        causal=True,
        alpha=0.8,
        beta=0.7,
    )
    yield compact(
        "lln_diag_full_block16_n37",
        "lln-diag",
        "blocks longer than D",
        (1, 2, 1, 37, 37, 3, 4),
        block=16,
        alpha=1.1,
        beta=1.2,
    )
    yield compact(
        "lln_diag_full_block_longer_than_n",
        "lln-diag",
        "one block: softmax attention beside lln",
        (1, 2, 1, 11, 11, 4, 3),
        block=64,
        alpha=1.5,
        beta=0.8,
    )
    yield compact(
        "lln_diag_causal_block1",
        "lln-diag",
        "blocks of one key: o_diag = v",
        (1, 2, 2, 9, 9, 3, 2),
        causal=True,
        block=1,
        alpha=1.2,
        beta=1.4,
    )
    yield compact(
        "lln_diag_causal_n1",
        "lln-diag",
        "one token: o = v, every other gradient 0",
        (2, 2, 1, 1, 1, 4, 3),
        causal=True,
        alpha=1.2,
        beta=0.7,
        zero=("q", "k", "alpha", "beta"),
    )
    yield compact(
        "lln_diag_causal_cross_n9_n22",
        "lln-diag",
        "query i has the position i + 13, inside a block of 5",
        (1, 4, 2, 9, 22, 4, 3),
        causal=True,
        block=5,
        alpha=0.9,
        beta=1.1,
    )
    yield compact(
        "lln_diag_causal_one_query_n11",
        "lln-diag",
        "the only query is the third row of a block of 4",
        (2, 2, 1, 1, 11, 4, 3),
        causal=True,
        alpha=1.1,
        beta=1.1,
    )
    yield random_factors(
        compact(
            "lln_diag_full_scale_gqa",
            "lln-diag",
            "r and p by head and column, some below 0",
            (2, 4, 2, 14, 14, 4, 3),
            combine="scale",
            alpha=1.2,
            beta=0.8,
        )
    )
    yield random_factors(
        compact(
            "lln_diag_causal_ratio_cross",
            "lln-diag",
            "r and 1 - r",
            (1, 4, 1, 10, 17, 4, 5),
            causal=True,
            combine="ratio",
            block=6,
            alpha=1.0,
            beta=1.3,
        ),
        "r",
    )
    yield random_factors(
        compact(
            "lln_diag_causal_scale_r_only",
            "lln-diag",
            "p is absent and so 0.5",
            (1, 2, 1, 15, 15, 4, 3),
            causal=True,
            combine="scale",
            alpha=1.0,
            beta=0.6,
        ),
        "r",
    )
    yield compact(
        "lln_diag_full_ratio_default",
        "lln-diag",
        "ratio without r: half and half",
        (1, 2, 1, 10, 10, 4, 3),
        combine="ratio",
        alpha=1.0,
        beta=0.6,
    )
    case = compact(
        "lln_diag_full_constant_values",
        "lln-diag",
        "v constant in each column: o = v, dq = dk = 0",
        (1, 2, 1, 13, 13, 4, 3),
        alpha=1.4,
        beta=1.1,
        zero=("q", "k", "alpha", "beta"),
    )
    case.v[:] = case.v[:, :, :1]
    yield case
    # Small integers: every score is exact, in any order of its sum.
    case = compact(
        "lln_diag_causal_scores_near_200",
        "lln-diag",
        "scores of blocks from -200 to 200, past the range of exp in fp32",
        (1, 2, 1, 18, 18, 4, 3),
        causal=True,
        block=6,
        alpha=0.125,
        beta=0.125,
        grad_rtol_f32=2e-4,  # a score of 200 in fp32 is known to 1e-5, and so is its weight
    )
    case.q, case.k = np.rint(4 * case.q), np.rint(4 * case.k)
    case.q[..., 0], case.k[..., 0] = 20.0, np.where(case.k[..., 0] < 0, -20.0, 20.0)
    yield case
    case = compact(
        "lln_diag_full_float32",
        "lln-diag",
        "stored as float32",
        (1, 2, 1, 12, 12, 5, 3),
        storage="<f4",
        alpha=1.25,
        beta=0.75,
        combine="scale",
    )
    extents = (2, 3)
    case.diag_r, case.diag_p = np.full(extents, 0.75), np.full(extents, -0.5)
    yield case


def moment_cases():
    yield with_moments(
        compact(
            "lln_full_moments_gqa",
            "lln",
            "alpha and beta from the moments of all of q and k, which gradients do not pass through",
            (2, 4, 2, 8, 11, 4, 3),
            spread=0.8,
        )
    )
    case = compact(
        "lln_full_moments_head_gqa",
        "lln",
        "moments per key/value head, of q over the heads of a group; every head has its own spread",
        (2, 4, 2, 7, 9, 4, 3),
    )
    case.q *= np.array([0.5, 1.25, 0.75, 1.5])[:, None, None]
    case.k *= np.array([0.625, 1.125])[:, None, None]
    yield with_moments(case, "head")
    case = compact(
        "lln_full_moments_offset",
        "lln",
        "q and k have means of 3 and -2, which are no part of their deviations",
        (1, 2, 1, 12, 16, 4, 3),
    )
    case.q, case.k = case.q + 3, case.k - 2
    yield with_moments(case, "tensor")
    yield with_moments(
        compact(
            "lln_diag_full_moments_head",
            "lln-diag",
            "LLN+Diag with moments per head",
            (1, 4, 2, 13, 13, 4, 3),
        ),
        "head",
    )


def extended_diag_cases():
    case = compact(
        "lln_diag_full_key_mask",
        "lln-diag",
        "hidden keys keep their positions; a block is hidden as a whole, NaN there",
        (2, 4, 2, 14, 14, 4, 3),
        combine="scale",
        alpha=1.2,
        beta=0.9,
    )
    case.key_mask = np.ones((2, 14), np.uint8)
    case.key_mask[0, [0, 4, 5, 6, 7, 9]] = case.key_mask[1, [2, 12, 13]] = 0
    yield random_factors(poisoned(case))
    case = compact(
        "lln_diag_causal_left_padding",
        "lln-diag",
        "left padding, NaN there: the first rows see no key, o = 0",
        (2, 2, 1, 13, 13, 4, 3),
        causal=True,
        combine="ratio",
        block=4,
        alpha=1.1,
        beta=1.0,
    )
    case.key_mask = np.ones((2, 13), np.uint8)
    case.key_mask[0, :6] = case.key_mask[1, :1] = 0
    yield random_factors(poisoned(case), "r")
    case = compact(
        "lln_diag_causal_key_mask_cross",
        "lln-diag",
        "a row may see keys of lln and none of its block",
        (2, 2, 1, 8, 19, 4, 3),
        causal=True,
        alpha=0.9,
        beta=1.2,
    )
    case.key_mask = np.ones((2, 19), np.uint8)
    case.key_mask[0, 12:17] = case.key_mask[1, ::3] = 0
    yield poisoned(case)
    case = compact(
        "lln_diag_causal_packed",
        "lln-diag",
        "members of 1, 0, 11, 8, 2 tokens: blocks begin anew in each",
        (1, 4, 2, 22, 22, 4, 3),
        causal=True,
        alpha=1.3,
        beta=0.8,
    )
    case.cu_q = case.cu_k = np.array([0, 1, 1, 12, 20, 22])
    yield case
    case = compact(
        "lln_diag_causal_packed_cross",
        "lln-diag",
        "positions count from the end of each member's keys",
        (1, 2, 1, 11, 25, 3, 4),
        causal=True,
        combine="scale",
        block=4,
        alpha=1.0,
        beta=1.1,
    )
    case.cu_q, case.cu_k = np.array([0, 3, 4, 11]), np.array([0, 10, 11, 25])
    yield random_factors(case)
    case = compact(
        "lln_diag_full_packed",
        "lln-diag",
        "a block never reaches into the next member",
        (1, 2, 2, 17, 17, 4, 3),
        block=6,
        alpha=0.7,
        beta=1.4,
    )
    case.cu_q = case.cu_k = np.array([0, 7, 15, 17])
    yield case
    for scope in (None, "head"):
        # More keys than queries: padding of keys says nothing of queries.
        case = compact(
            "lln_full_moments_" + ("head_" if scope else "") + "key_mask",
            "lln",
            "hidden keys, NaN, are no part of the moments",
            (2, 4, 2, 9, 16, 4, 3),
        )
        case.key_mask = np.ones((2, 16), np.uint8)
        case.key_mask[0, [1, 2, 15]] = case.key_mask[1, 8:] = 0
        yield with_moments(poisoned(case), scope)


def random_projection(case, features, size=1.0):
    """Gives a case of Performer normal rows; what an implementation draws is its own affair."""
    rng = source("projection of " + case.name)
    case.projection = rounded(size * rng.standard_normal((features, case.q.shape[3])))
    return case


def compared_cases():
    """Exact attention, and the kernels it is compared with."""
    yield compact(
        "softmax_full_defaults_n19", "softmax", "no /config group", (1, 2, 2, 19, 19, 5, 3)
    )
    yield compact(
        "softmax_full_gqa_cross_n7_n12",
        "softmax",
        "GQA, more keys than queries; all extents differ",
        (1, 6, 3, 7, 12, 5, 4),
    )
    yield compact(
        "softmax_causal_gqa_n33",
        "softmax",
        "one row more than 32",
        (1, 2, 1, 33, 33, 4, 3),
        causal=True,
    )
    yield compact(
        "softmax_causal_cross_n9_n22",
        "softmax",
        "query i sees keys up to i + 13",
        (2, 1, 1, 9, 22, 4, 3),
        causal=True,
    )
    yield compact(
        "softmax_causal_scale",
        "softmax",
        "a scale of its own, 1.25",
        (1, 2, 1, 11, 11, 6, 2),
        causal=True,
        scale=1.25,
    )
    yield compact(
        "softmax_full_one_key",
        "softmax",
        "one key: o = v, dq = dk = 0",
        (2, 2, 1, 3, 1, 4, 5),
        zero=("q", "k"),
    )
    case = compact(
        "softmax_full_large_scores",
        "softmax",
        "scores from about -240 to 360, the largest of a row close to each other",
        (1, 2, 1, 12, 18, 4, 3),
        spread=9.0,
        # In fp32 a score of 360 log2(e) is off by up to 3e-5, and so is the weight it gives.
        rtol_f32=1e-4,
        grad_rtol_f32=1e-4,
    )
    # Three keys at a time are neighbours. All products and their sums are exact in fp32.
    case.q, case.k = np.rint(4 * case.q) / 4, np.rint(4 * case.k) / 4
    near = source("neighbours of " + case.name).randint(-1, 2, case.k.shape) / 8
    case.k = np.repeat(case.k[:, :, ::3], 3, axis=2) + near
    scores = 0.5 * np.einsum("bhid,bjd->bhij", case.q, case.k[:, 0])
    assert 220 < scores.max() < 400 and -400 < scores.min() < -220, (scores.min(), scores.max())
    yield case

    yield compact(
        "taylor_full_gqa_cross_n8_n13",
        "taylor",
        "GQA, more keys than queries; all extents differ",
        (2, 4, 1, 8, 13, 5, 3),
    )
    yield compact(
        "taylor_causal_unnormalised_scale",
        "taylor",
        "normalise = 0; scale 0.75 is that of the scores",
        (1, 2, 1, 18, 18, 4, 3),
        causal=True,
        normalise=False,
        scale=0.75,
    )
    yield compact(
        "cosine_full_gqa_cross_n8_n13",
        "cosine",
        "not divided by the sum of weights, which is the default; scale -0.5",
        (2, 4, 1, 8, 13, 5, 3),
        scale=-0.5,
    )
    yield compact(
        "cosine_causal_normalised_positive",
        "cosine",
        "normalise = 1 with positive elements",
        (1, 2, 1, 18, 18, 4, 3),
        positive=True,
        causal=True,
        normalise=True,
    )
    yield random_projection(
        compact(
            "performer_full_gqa_cross_n8_n13",
            "performer",
            "7 features; GQA, more keys than queries",
            (2, 4, 1, 8, 13, 5, 3),
        ),
        7,
    )
    yield random_projection(
        compact(
            "performer_full_unnormalised_scale",
            "performer",
            "normalise = 0: scale 0.5 times the mean over 6 features",
            (1, 2, 2, 9, 9, 3, 4),
            normalise=False,
            scale=0.5,
        ),
        6,
    )
    case = random_projection(
        compact(
            "performer_causal_rising_keys",
            "performer",
            "logits of keys rise from about -70 to 30, nearly all above those before",
            (1, 2, 1, 24, 24, 4, 3),
            causal=True,
            # Exponents of size 70 log2(e) cost up to 6e-6 of a weight in fp32.
            grad_rtol_f32=1e-4,
        ),
        9,
    )
    # Every row of the projection leans to the first axis, along which the keys move.
    case.projection[:, 0] = 8 + np.abs(case.projection[:, 0])
    case.k[..., 0] = np.linspace(-8, 6, 24)
    yield case


def extended_compared_cases():
    case = compact(
        "softmax_full_key_mask",
        "softmax",
        "hidden keys hold NaN; the second entry sees one key only",
        (2, 2, 1, 6, 11, 4, 3),
    )
    case.key_mask = np.array([[1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0], [0] * 7 + [1] + [0] * 3], np.uint8)
    yield poisoned(case)
    case = compact(
        "softmax_causal_left_padding",
        "softmax",
        "rows before the first visible key see nothing: o = 0",
        (2, 2, 1, 10, 10, 4, 3),
        causal=True,
    )
    case.key_mask = np.array([[0] * 3 + [1] * 7, [0] * 6 + [1, 0, 1, 1]], np.uint8)
    yield poisoned(case)
    case = compact(
        "softmax_causal_packed",
        "softmax",
        "four members, one without queries and one of one token",
        (1, 2, 1, 16, 21, 4, 3),
        causal=True,
    )
    case.cu_q, case.cu_k = np.array([0, 5, 5, 6, 16]), np.array([0, 8, 10, 11, 21])
    case.k[:, :, 8:10], case.v[:, :, 8:10] = np.nan, np.nan
    yield case
    case = compact(
        "performer_causal_left_padding",
        "performer",
        "rows before the first visible key see nothing: o = 0",
        (2, 2, 1, 9, 9, 4, 3),
        causal=True,
    )
    case.key_mask = np.array([[0] * 3 + [1] * 6, [1, 1, 0, 1, 0, 0, 1, 1, 1]], np.uint8)
    yield random_projection(poisoned(case), 6)


def bits_of_mixture(n, diagonal, rest):
    """Entropy of a row with one entry `diagonal` and n - 1 entries `rest`."""
    return -(diagonal * np.log2(diagonal) + (n - 1) * rest * np.log2(rest))


def one_entry_per_row(case, diagonal, rest, gap):
    """Known answers of a matrix with `diagonal` in one place of each row and column, else `rest`."""
    n = case.q.shape[2]
    n2 = WIDE(n) * n
    diagonal, rest = WIDE(diagonal), WIDE(rest)
    ratio = np.log(diagonal / rest)
    within = ratio**2 * (n - 1) / n2
    entropy = bits_of_mixture(n, diagonal, rest)
    case.known = {
        "entropy": entropy,
        "entropy_biased": 0,
        "entropy_unbiased": np.log2(WIDE(n)) - entropy,
        "spectral_gap": gap,
        "variance": (diagonal - rest) ** 2 * (n - 1) / n2,
        "logvar": within,
        "logvar_within": within,
    }
    case.diagnostics = True
    return case


def diagnostics_cases():
    def plain(name, variant, description, extents, **options):
        return compact(name, variant, description, extents, diagnostics=True, **options)

    n = 6
    eye = np.eye(n)
    # exp(c) / (exp(c) + 5) = 0.9 + 0.1 / 6
    c = math.log((0.9 + 0.1 / n) / (0.1 / n))
    e = np.exp(WIDE(c))
    for name, turn, what in (
        ("identity", 0, "0.9 of the identity and 0.1 of uniform rows: gap 0.1"),
        ("cycle", 1, "0.9 of a cyclic permutation, whose eigenvalues are complex, and 0.1 of uniform"),
    ):
        case = plain(
            f"softmax_full_{name}", "softmax", what, (1, 1, 1, n, n, n, 2), scale=1.0
        )
        case.q[0, 0], case.k[0, 0] = c * np.roll(eye, turn, axis=1), eye
        share = (e - 1) / (e + n - 1)
        yield one_entry_per_row(case, e / (e + n - 1), 1 / (e + n - 1), 1 - share)

    case = plain(
        "softmax_full_one_token",
        "softmax",
        "every row has 0.9 + 0.1 / 6 on the first token: gap 1, no unbiased part",
        (1, 1, 1, n, n, 4, 2),
        scale=1.0,
    )
    case.q[:], case.k[:] = 0.0, 0.0
    case.q[..., 0], case.k[0, 0, 0, 0] = 1.0, c
    entropy = bits_of_mixture(n, e / (e + n - 1), 1 / (e + n - 1))
    case.known = {
        "entropy": entropy,
        "entropy_biased": np.log2(WIDE(n)) - entropy,
        "entropy_unbiased": 0,
        "spectral_gap": 1,
    }
    yield case

    case = plain(
        "softmax_causal_uniform",
        "softmax",
        "q = 0: row i is 1/i, gap 1/2",
        (1, 2, 1, n, n, 4, 2),
        causal=True,
    )
    case.q[:] = 0.0
    counts = np.arange(1, n + 1).astype(WIDE)
    logs = -np.log(np.repeat(counts, np.arange(1, n + 1)))
    case.known = {
        "entropy": np.log2(counts).mean(),
        "spectral_gap": WIDE(0.5),
        "logvar": ((logs - logs.mean()) ** 2).mean(),
        "logvar_within": 0,
    }
    yield case

    case = plain(
        "lln_full_uniform",
        "lln",
        "beta = 0: uniform rows, entropy log2 N, gap 1, no variance",
        (1, 2, 1, 8, 8, 3, 2),
        alpha=1.0,
        beta=0.0,
        zero=("q", "alpha", "k"),
    )
    case.known = {
        "entropy": WIDE(3),
        "entropy_biased": 0,
        "entropy_unbiased": 0,
        "spectral_gap": 1,
        "variance": 0,
        "logvar": 0,
        "logvar_within": 0,
    }
    yield case
    case = plain(
        "lln_full_identity",
        "lln",
        "q and k are multiples of the identity: one weight on the diagonal, another beside it",
        (1, 1, 1, n, n, n, 2),
        alpha=1.5,
        beta=2.0,
    )
    case.q[0, 0], case.k[0, 0] = 2.0 * eye, eye
    a, b = np.exp(WIDE(3)), np.exp(WIDE(2))
    on, off = a * b + (n - 1), a + b + (n - 2)
    total = on + (n - 1) * off
    yield one_entry_per_row(case, on / total, off / total, 1 - (on - off) / total)
    case = plain(
        "elu_full_identity",
        "elu",
        "features of 4 and 8 on the diagonals of q and k, of 2 beside them",
        (1, 1, 1, n, n, n, 2),
    )
    case.q[0, 0], case.k[0, 0] = 1 + 2 * eye, 1 + 6 * eye
    on, off = WIDE(4 * 8 + (n - 1) * 4), WIDE(4 * 2 + 8 * 2 + (n - 2) * 4)
    total = on + (n - 1) * off
    yield one_entry_per_row(case, on / total, off / total, 1 - (on - off) / total)

    yield plain(
        "softmax_full_gqa", "softmax", "Gaussian q and k", (2, 2, 1, 9, 9, 4, 3), spread=1.25
    )
    yield plain(
        "softmax_causal",
        "softmax",
        "Gaussian q and k; the gap is 1 less the largest diagonal entry after the first",
        (2, 2, 2, 9, 9, 4, 3),
        causal=True,
        scale=0.75,
    )
    yield plain(
        "lln_full_gqa",
        "lln",
        "Gaussian q and k, alpha and beta of the usual size",
        (2, 4, 2, 9, 9, 4, 3),
        alpha=2.0,
        beta=2.0,
    )
    yield plain(
        "lln_causal",
        "lln",
        "Gaussian q and k",
        (1, 2, 1, 14, 14, 4, 3),
        causal=True,
        alpha=np.array([1.5, 2.5]),
        beta=2.0,
    )
    yield plain(
        "elu_full_gqa", "elu", "Gaussian q and k", (2, 2, 1, 9, 9, 4, 3), spread=1.5
    )
    yield plain(
        "elu_causal", "elu", "Gaussian q and k", (1, 2, 2, 13, 13, 4, 3), causal=True
    )


def cases():
    for group in (foundation_cases, affine_cases):
        yield from group()
    for group in (diag_cases, moment_cases, compared_cases):
        yield from map(sound, group())
    for folder, groups in (
        ("extended", (extended_cases, extended_affine_cases)),
        ("extended", (lambda: map(sound, extended_diag_cases()),)),
        ("extended", (lambda: map(sound, extended_compared_cases()),)),
        ("diagnostics", (lambda: map(sound, diagnostics_cases()),)),
    ):
        for group in groups:
            for case in group():
                case.folder = folder
                yield case


# --------------------------------------------------------------------------------------------------
# Comparison of two folders, command line


def contents(path):
    """Every object of a file: attributes and datasets with their types and values."""
    found = {}
    with h5py.File(path, "r") as file:

        def visit(name, item):
            for key in item.attrs:
                kind = item.attrs.get_id(key).get_type()
                value = item.attrs[key]
                value = value if isinstance(value, (str, bytes)) else np.asarray(value)
                found[f"{name}@{key}"] = (kind, value)
            if isinstance(item, h5py.Dataset):
                found[name] = (item.id.get_type(), item[()])
            else:
                found[name] = (None, "group")

        visit("/", file)
        file.visititems(lambda name, item: visit("/" + name, item))
    return found


def differences(left, right):
    """What differs between two files: inputs exactly, computed values to 1e-13.

    Another processor or mathematical library may round a computed value in another way.
    """
    with open(left, "rb") as a, open(right, "rb") as b:
        if a.read() == b.read():
            return []
    a, b = contents(left), contents(right)
    found = [f"{name}: only in one of the files" for name in sorted(set(a) ^ set(b))]
    for name in sorted(set(a) & set(b)):
        (kind_a, x), (kind_b, y) = a[name], b[name]
        if (kind_a is None) != (kind_b is None) or (kind_a is not None and not kind_a == kind_b):
            found.append(f"{name}: types differ")
        elif isinstance(x, (str, bytes)) or isinstance(y, (str, bytes)):
            if x != y:
                found.append(f"{name}: {x!r} and {y!r}")
        elif np.shape(x) != np.shape(y):
            found.append(f"{name}: extents {np.shape(x)} and {np.shape(y)}")
        elif name.startswith("/expected") and "@" not in name:
            # The last fp32 bit may go either way where a value lies between two of them.
            limit = 1e-13 if x.dtype.itemsize == 8 else 1.2e-7
            error = relative_error(x, y)
            if not error <= limit:
                found.append(f"{name}: values differ by {error:.3g}")
        elif not np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f"):
            found.append(f"{name}: values differ")
    return found


def generate(folder, pattern, quiet=False):
    """Writes every case that matches and returns (relative path, report) for each."""
    made = []
    for case in cases():
        if not fnmatch.fnmatch(case.name, pattern):
            continue
        out, grad, report = verified(case)
        target = os.path.join(folder, case.folder)
        os.makedirs(target, exist_ok=True)
        path = os.path.join(target, case.name + ".h5")
        write(case, out, grad, path + ".part")
        os.replace(path + ".part", path)
        size = os.path.getsize(path)
        assert size < 200 * 1024, f"{case.name}: {size} bytes"
        made.append((os.path.join(case.folder, case.name + ".h5"), report))
        if not quiet:
            print(
                f"{made[-1][0]:58s} {size:7d} B  scalar {report.scalar:.1e}  fd {report.fd:.1e}"
                f"  f64 {report.f64:.1e}  f32 {report.f32:.1e}",
                flush=True,
            )
    return made


def listed(folder):
    found = set()
    for base in ("", "extended", "diagnostics"):
        here = os.path.join(folder, base)
        if os.path.isdir(here):
            found.update(os.path.join(base, n) for n in os.listdir(here) if n.endswith(".h5"))
    return found


def main():
    parser = argparse.ArgumentParser(description="Writes the gradient fixtures.")
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument(
        "--out", default=os.path.join(here, "fixtures"), help="folder of the fixtures"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names to write or to check")
    parser.add_argument(
        "--check",
        action="store_true",
        help="regenerate into a temporary folder and compare; exit 1 on a difference",
    )
    arguments = parser.parse_args()

    if arguments.check:
        with tempfile.TemporaryDirectory() as temporary:
            made = generate(temporary, arguments.only, quiet=True)
            bad = 0
            for name, _ in made:
                there = os.path.join(arguments.out, name)
                if not os.path.exists(there):
                    lines = ["missing"]
                else:
                    lines = differences(os.path.join(temporary, name), there)
                for line in lines:
                    print(f"{name}: {line}")
                bad += bool(lines)
            if arguments.only == "*":
                for name in sorted(listed(arguments.out) - {n for n, _ in made}):
                    print(f"{name}: not one of this script's fixtures")
                    bad += 1
    else:
        made = generate(arguments.out, arguments.only)
        bad = 0
    if not made:
        sys.exit(f"make_fixtures.py: no fixture is called {arguments.only}")
    print(
        f"{len(made)} fixtures, {bad} differ"
        if arguments.check
        else f"{len(made)} fixtures written"
    )
    print(
        "worst finite-difference error %.1e (limit %.0e), worst against scalar loops %.1e"
        % (max(r.fd for _, r in made), FD_LIMIT, max(r.scalar for _, r in made))
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
