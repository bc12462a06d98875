#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes bad/*.h5, one defect per file, and bad/manifest.tsv.

The manifest has a line per file: its name, the command that meets the defect (run: `linattn run
FILE OUT --backward`, verify: `linattn verify FILE`), its exit status, a word that the message has
to contain, and what is wrong.

    make_bad.py            writes the folder bad beside this script
    make_bad.py --check    regenerates into a temporary folder, compares, exits 1 if bytes differ
"""

import argparse
import os
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    sys.exit("make_bad.py: the Python module numpy is missing (Debian: python3-numpy)")
try:
    import h5py
except ImportError:
    sys.exit("make_bad.py: the Python module h5py is missing (Debian: python3-h5py)")

sys.dont_write_bytecode = True
from make_fixtures import open_for_writing, require_group, verified, write_string  # noqa: E402
from make_fixtures import draw, write  # noqa: E402

B, H, HKV, NQ, NK, D, DV = 2, 4, 2, 3, 5, 2, 1


def ramp(*extents):
    size = int(np.prod(extents))
    return (np.arange(size, dtype=np.float64) % 7 / 8 + 0.125).reshape(extents)


class Contents:
    """What a good plain input holds; a defect changes one thing of it."""

    def __init__(self):
        self.root = {"schema": "linattn-1", "variant": "elu", "producer": "data/make_bad.py"}
        self.config = {}
        self.data = {
            "inputs/q": ramp(B, H, NQ, D),
            "inputs/k": ramp(B, HKV, NK, D),
            "inputs/v": ramp(B, HKV, NK, DV),
            "cotangent/o": ramp(B, H, NQ, DV),
        }

    def write(self, path):
        with open_for_writing(path) as file:
            for name, text in self.root.items():
                write_string(file, name, text)
            if self.config:
                config = require_group(file, "config")
                for name, value in self.config.items():
                    if isinstance(value, str):
                        write_string(config, name, value)
                    else:
                        config.attrs[name] = value
            for name, data in self.data.items():
                group, _, last = name.rpartition("/")
                if data is None:
                    require_group(file, name)
                else:
                    require_group(file, group).create_dataset(last, data=data, track_times=False)


DEFECTS = []


def defect(name, word, what):
    def register(change):
        DEFECTS.append((name, word, what, change))
        return change

    return register


def replaces(name, word, what, path, data):
    DEFECTS.append((name, word, what, lambda c: c.data.update({path: data})))


def removes(name, word, what, path):
    DEFECTS.append((name, word, what, lambda c: c.data.pop(path)))


def configures(name, word, what, **attributes):
    DEFECTS.append((name, word, what, lambda c: c.config.update(attributes)))


removes("missing_q", "/inputs/q", "/inputs/q is missing", "inputs/q")
removes("missing_v", "/inputs/v", "/inputs/v is missing", "inputs/v")
replaces(
    "q_integer",
    "/inputs/q",
    "/inputs/q holds integers",
    "inputs/q",
    np.ones((B, H, NQ, D), np.int32),
)
replaces(
    "k_string", "/inputs/k", "/inputs/k holds strings", "inputs/k", np.full((B, HKV, NK, D), b"1.0")
)
replaces("q_rank_3", "/inputs/q", "/inputs/q has three extents", "inputs/q", ramp(H, NQ, D))
replaces("v_group", "/inputs/v", "/inputs/v is a group", "inputs/v", None)
replaces(
    "batch_differs",
    "/inputs/k",
    "k has another batch extent than q",
    "inputs/k",
    ramp(B + 1, HKV, NK, D),
)
replaces(
    "features_differ",
    "/inputs/k",
    "k has another head dimension than q",
    "inputs/k",
    ramp(B, HKV, NK, D + 1),
)
replaces(
    "rows_differ",
    "/inputs/v",
    "v has another number of rows than k",
    "inputs/v",
    ramp(B, HKV, NK + 1, DV),
)
replaces(
    "value_heads_differ",
    "/inputs/v",
    "v has another number of heads than k",
    "inputs/v",
    ramp(B, 1, NK, DV),
)
replaces(
    "cotangent_extents",
    "/cotangent/o",
    "/cotangent/o is not (B, H, Nq, Dv)",
    "cotangent/o",
    ramp(B, H, NQ, DV + 1),
)


@defect("heads_do_not_divide", "heads", "4 query heads, 3 key/value heads")
def _(c):
    c.data["inputs/k"], c.data["inputs/v"] = ramp(B, 3, NK, D), ramp(B, 3, NK, DV)


@defect("causal_more_queries", "causal", "causal with 6 queries and 5 keys")
def _(c):
    c.config["causal"] = 1
    c.data["inputs/q"], c.data["cotangent/o"] = ramp(B, H, 6, D), ramp(B, H, 6, DV)


@defect("schema_missing", "schema", "no root attribute schema")
def _(c):
    del c.root["schema"]


@defect("schema_unknown", "linattn-9", "schema linattn-9")
def _(c):
    c.root["schema"] = "linattn-9"


@defect("variant_unknown", "sigmoid", "variant sigmoid")
def _(c):
    c.root["variant"] = "sigmoid"


@defect("variant_missing", "variant", "/expected without a variant")
def _(c):
    del c.root["variant"]
    c.data["expected/o"] = ramp(B, H, NQ, DV)


configures("attribute_unknown", "casual", "unknown attribute casual in /config", casual=1)
configures("causal_2", "causal", "causal = 2", causal=2)
configures("causal_string", "causal", "causal is a string", causal="yes")


@defect("alpha_missing", "alpha", "lln without alpha")
def _(c):
    c.root["variant"], c.config["beta"] = "lln", 1.0


@defect("alpha_extent", "/config/alpha", "/config/alpha has 3 entries for 4 heads")
def _(c):
    c.root["variant"], c.config["beta"] = "lln", 1.0
    c.data["config/alpha"] = np.ones(3)


@defect("expected_extents", "/expected/o", "/expected/o is not (B, H, Nq, Dv)")
def _(c):
    c.data["expected/o"] = ramp(B, H, NQ + 1, DV)


@defect("mask_extents", "/inputs/key_mask", "/inputs/key_mask is (B, Nq)")
def _(c):
    c.data["inputs/key_mask"] = np.ones((B, NQ), np.uint8)


def packed(name, cu_q, cu_k, what, **more):
    word = "cu_seqlens"

    @defect("packed_" + name, word, what)
    def _(c):
        batch = more.get("batch", 1)
        for path, extents in (
            ("inputs/q", (H, 6, D)),
            ("inputs/k", (HKV, 6, D)),
            ("inputs/v", (HKV, 6, DV)),
            ("cotangent/o", (H, 6, DV)),
        ):
            c.data[path] = ramp(batch, *extents)
        if more.get("mask"):
            c.data["inputs/key_mask"] = np.ones((batch, 6), np.uint8)
        c.config["causal"] = 1
        c.data["inputs/cu_seqlens_q"] = np.array(cu_q, np.int64)
        if cu_k is not None:
            c.data["inputs/cu_seqlens_k"] = np.array(cu_k, np.int64)


packed("batch_2", [0, 6], [0, 6], "packed with B = 2", batch=2)
packed("not_from_0", [1, 6], [0, 6], "cu_seqlens_q begins at 1")
packed("decreasing", [0, 4, 2, 6], [0, 4, 4, 6], "cu_seqlens_q decreases")
packed("past_end", [0, 3, 7], [0, 3, 6], "cu_seqlens_q ends past Nq")
packed("counts_differ", [0, 3, 6], [0, 6], "two members for the queries, one for the keys")
packed("only_queries", [0, 6], None, "cu_seqlens_k is missing")
packed("with_mask", [0, 6], [0, 6], "key_mask beside cu_seqlens", mask=True)
packed("causal_member", [0, 4, 6], [0, 2, 6], "a causal member with 4 queries and 2 keys")


def affine(name, word, what, **attributes):
    @defect("affine_" + name, word, what)
    def _(c):
        c.root["variant"] = "affine"
        c.config.update(attributes)


affine("a_b_zero", "a = b = 0", "affine with a = b = 0", a=0.0, b=0.0)
affine("dropout_negative", "found -0.1", "dropout_p = -0.1", dropout_p=-0.1)
affine("dropout_nan", "dropout_p", "dropout_p is not a number", dropout_p=float("nan"))
affine("max_causal", "qk_norm max", "qk_norm = max under a causal mask", qk_norm="max", causal=1)
affine("scale_infinite", "a finite number", "scale is infinite", scale=float("inf"))


@defect(
    "affine_small_g_found",
    "qk_norm='l2'",
    "the weights of row 1 of head 2, batch entry 1, sum to 5e-9 for 5 keys",
)
def _(c):
    c.root["variant"] = "affine"
    c.config.update(qk_norm="none", scale=1.0, small_g="check")
    c.data["inputs/k"][1, 1] = (1.0, 0.0)
    c.data["inputs/q"][1, 2, 1] = (-1.0 + 2.0**-30, 0.0)


def lln(name, word, what, variant="lln-diag", square=True, **attributes):
    """A defect of LLN or LLN+Diag, of 5 queries and 5 keys if square."""

    @defect(name, word, what)
    def _(c):
        c.root["variant"] = variant
        c.config.update(attributes)
        if square:
            c.data["inputs/q"], c.data["cotangent/o"] = ramp(B, H, NK, D), ramp(B, H, NK, DV)


RATES = {"alpha": 1.0, "beta": 1.0}
lln("lln_diag_block_0", "block", "block = 0", block=0, **RATES)
lln("lln_diag_combine_unknown", "average, scale, ratio", "combine = sum", combine="sum", **RATES)
lln(
    "lln_diag_full_cross",
    "Nq = Nk",
    "blocks without a causal mask for 3 queries and 5 keys",
    square=False,
    **RATES,
)
lln("moments_with_alpha", "moments", "moments beside alpha", "lln", moments="authors", alpha=1.0)
lln("moments_unknown", "moments", "moments = writers", "lln", moments="writers")
lln("moments_causal", "causal", "moments of a causal call", "lln", moments="authors", causal=1)


@defect("lln_diag_r_extents", "/inputs/diag_r", "/inputs/diag_r is (Hkv, Dv)")
def _(c):
    c.root["variant"] = "lln-diag"
    c.config.update(combine="scale", causal=1, **RATES)
    c.data["inputs/diag_r"] = ramp(HKV, DV)


@defect("softmax_scale_negative", "a finite number > 0", "softmax with scale = -0.5")
def _(c):
    c.root["variant"], c.config["scale"] = "softmax", -0.5


@defect("softmax_scale_zero", "a finite number > 0", "softmax with scale = 0")
def _(c):
    c.root["variant"], c.config["scale"] = "softmax", 0.0


@defect("performer_projection_extents", "/inputs/projection", "/inputs/projection is (4, Dv)")
def _(c):
    c.root["variant"] = "performer"
    c.data["inputs/projection"] = ramp(4, DV)


@defect("performer_features_differ", "features", "features = 5 beside a projection of 4 rows")
def _(c):
    c.root["variant"], c.config["features"] = "performer", 5
    c.data["inputs/projection"] = ramp(4, D)


def generate(folder):
    os.makedirs(folder, exist_ok=True)
    lines = []
    for name, word, what, change in DEFECTS:
        contents = Contents()
        change(contents)
        contents.write(os.path.join(folder, name + ".h5"))
        command = "verify" if "expected/o" in contents.data else "run"
        lines.append((name + ".h5", command, "2", word, what))

    # Not quite HDF5.
    good = os.path.join(folder, "good.part")
    Contents().write(good)
    with open(good, "rb") as file:
        data = file.read()
    os.remove(good)
    for name, content, what in (
        ("truncated", data[: len(data) // 2], "the first half of a file"),
        ("text", b"q k v\n1 2 3\n", "a text file"),
        ("empty", b"", "no bytes at all"),
    ):
        with open(os.path.join(folder, name + ".h5"), "wb") as file:
            file.write(content)
        lines.append((name + ".h5", "run", "2", name + ".h5", what))

    # A fixture in which one entry of one gradient is off by a thousandth of the largest.
    case = draw(
        "changed_gradient",
        "elu",
        "dk[0, 1, 3, 1] is wrong",
        (B, H, HKV, NQ, NK, D, DV),
        causal=True,
    )
    out, grad, _ = verified(case)
    grad["k"][0, 1, 3, 1] += 1e-3 * np.max(np.abs(grad["k"]))
    write(case, out, grad, os.path.join(folder, "changed_gradient.h5"))
    lines.append(
        ("changed_gradient.h5", "verify", "1", "/expected_grad/k", "dk[0, 1, 3, 1] is wrong")
    )

    with open(os.path.join(folder, "manifest.tsv"), "w", encoding="utf-8") as file:
        file.write("file\tcommand\tstatus\tword\twhat\n")
        for line in sorted(lines):
            file.write("\t".join(line) + "\n")
    return len(lines)


def main():
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bad")
    parser = argparse.ArgumentParser(description="Writes files that must be refused.")
    parser.add_argument("--out", default=here)
    parser.add_argument(
        "--check", action="store_true", help="compare bytes; exit 1 on a difference"
    )
    arguments = parser.parse_args()
    if not arguments.check:
        print(f"{generate(arguments.out)} files written")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        generate(temporary)
        names = sorted(set(os.listdir(temporary)) | set(os.listdir(arguments.out)))
        bad = []
        for name in names:
            both = [os.path.join(folder, name) for folder in (temporary, arguments.out)]
            if not all(map(os.path.exists, both)):
                bad.append(name)
            else:
                with open(both[0], "rb") as a, open(both[1], "rb") as b:
                    if a.read() != b.read():
                        bad.append(name)
    for name in bad:
        print(f"{name}: differs")
    print(f"{len(names)} files, {len(bad)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
