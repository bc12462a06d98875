#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Times the same shapes in PyTorch: causal linear attention with elu + 1, as people write it, and exact softmax.

    perf/peers.py [-o OUT.json] [--threads N] [--seconds S] [--methods LIST] [--device cpu|cuda] [--quick]
                  [--against FILE.json]
    perf/peers.py --training [-o OUT.json] [--threads N] [--device cpu|cuda] [--quick]

    quadratic   tril(phi(q) phi(k)^T) v by the matrix of weights
    chunked     matrix products in chunks of 64, states by a cumulative sum over chunks
    cumsum      the cumulative sum of all outer products, one state a token
    softmax     scaled_dot_product_attention, exact softmax attention

Backward is that of autograd, timed together with forward. Every case runs in a process of its own, with its peak of
memory beside the inputs; cases that would need more than --memory (4G) are left out. --against compares with results
of perf/attention. Exit status 2 if PyTorch is not installed.

--training is the memory of affine attention by cumulative sums, in the rows of perf/memory: what autograd keeps between
the passes beside q, k, v and o, and how the process grows in each.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

import results

METHODS = ("quadratic", "chunked", "cumsum", "softmax")
PASSES = ("forward", "forward_backward")
CHUNK = 64


# ---- one case, in a process of its own -------------------------------------------------------------------------------


def attention(method, variant="elu"):
    """The function (q, k, v) -> o of a method; tensors are (B, H, N, D)."""
    import torch
    import torch.nn.functional as F

    def one_more(x):
        return torch.cat([x, torch.ones_like(x[..., :1])], -1)

    def features(q, k, v):
        # the denominator is one more column of values
        if variant == "affine":  # and the constant 1 of the weights one more feature
            q, k = (one_more(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for x in (q, k))
        else:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        return q, k, one_more(v)

    def divide(n):
        return n[..., :-1] / n[..., -1:]

    def quadratic(q, k, v):
        q, k, v = features(q, k, v)
        return divide((q @ k.mT).tril() @ v)

    def cumsum(q, k, v):
        q, k, v = features(q, k, v)
        states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
        return divide((q.unsqueeze(-2) @ states).squeeze(-2))

    def chunked(q, k, v):
        q, k, v = features(q, k, v)
        n = q.shape[-2]
        pad = -n % CHUNK
        q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v))
        own = k.mT @ v
        before = own.cumsum(-3) - own
        out = q @ before + (q @ k.mT).tril() @ v
        return divide(out.flatten(-3, -2)[..., :n, :])

    def softmax(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {"quadratic": quadratic, "cumsum": cumsum, "chunked": chunked, "softmax": softmax}[method]


def process_bytes(field):
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return -1


def peak_bytes(run, device):
    """Growth of memory during run(), at its peak; -1 where unknown."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # forget the peak so far
    except OSError:
        return -1
    before = process_bytes("VmRSS")
    run()
    return process_bytes("VmHWM") - before


def tensors(case):
    """q, k and v, and dL/do."""
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(1)
    dtype = {"f32": torch.float32, "f64": torch.float64}[case["type"]]
    shape = [case[key] for key in ("B", "H", "N", "D")]
    made = [torch.rand(shape, dtype=dtype, device=case["device"]) * 2 - 1 for _ in range(4)]
    return made[:3], made[3]


def measure_training(case):
    """Bytes that autograd keeps beside q, k, v and o, and growth of memory in each pass."""
    import torch

    inputs, cotangent = tensors(case)
    forward = attention(case["method"], "affine")
    leaves = [x.detach().requires_grad_() for x in inputs]
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    output = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output.append(forward(*leaves))

    begin = process_bytes("VmRSS")
    forward_peak = peak_bytes(run, case["device"])
    between = process_bytes("VmRSS")
    for tensor in (*leaves, *output):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    backward_peak = peak_bytes(lambda: output[0].backward(cotangent), case["device"])
    row = case["B"] * case["H"] * case["N"] * leaves[0].element_size()
    found = {
        "tokens": case["B"] * case["H"] * case["N"],
        "element_bytes": leaves[0].element_size(),
        "fits": 1,
        "kept_hooks": sum(kept.values()),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if case["device"] == "cuda" else "",
    }
    if case["device"] == "cpu" and min(forward_peak, backward_peak) >= 0:
        o, gradients = row * case["D"], 3 * row * case["D"]
        found["kept_process"] = between - begin - o
        found["forward_process"] = forward_peak - (between - begin)
        found["backward_process"] = backward_peak - gradients
    return found


def measure(case):
    """Seconds (median), samples, spread and peak bytes of one case."""
    import torch

    inputs, cotangent = tensors(case)
    forward = attention(case["method"])

    def wait():
        if case["device"] == "cuda":
            torch.cuda.synchronize()

    def run():
        if case["pass"] == "forward":
            with torch.no_grad():
                forward(*inputs)
        else:
            leaves = [x.detach().requires_grad_() for x in inputs]
            forward(*leaves).backward(cotangent)
        wait()

    peak = peak_bytes(run, case["device"])
    run()
    times = []
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        passed = time.perf_counter() - begin
        if passed > case["seconds"] and (len(times) >= 7 or passed > 3 * case["seconds"]):
            break
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    median = statistics.median(times)
    return {
        "seconds": median,
        "best_s": min(times),
        "spread": (quartiles[2] - quartiles[0]) / median,
        "samples": len(times),
        "peak_bytes": peak,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if case["device"] == "cuda" else "",
    }


# ---- all of them -----------------------------------------------------------------------------------------------------


def estimated_bytes(case):
    """Of the largest tensors that autograd keeps, roughly."""
    element = {"f32": 4, "f64": 8}[case["type"]]
    rows = case["B"] * case["H"] * case["N"]
    largest = {
        "quadratic": rows * case["N"],
        "cumsum": rows * case["D"] * (case["D"] + 1),
        "chunked": rows * case["D"] * (2 + case["D"] // CHUNK),
        "softmax": rows * case["D"] * 4,
    }[case["method"]]
    return element * largest * (2 if case["pass"] == "forward" else 4)


def size(text):
    """'4G' in bytes."""
    units = {"M": 2**20, "G": 2**30}
    try:
        return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(text)
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4G") from None


def shapes(quick):
    """(group, B, H, N, D), as in perf/attention and perf/sweeps."""
    yield "main", 1, 8, 4096, 64
    if quick:
        return
    yield "main", 1, 8, 2048, 128
    for power in range(6, 18):
        yield "n_sweep", 1, 2, 2**power, 64


def training_shapes(quick):
    """(B, H, N, D), as in perf/memory."""
    for d in (32, 64, 128):
        for power in range(10, 12 if quick else 16):
            yield 1, 8, 2**power, d


def run_case(case):
    environment = dict(os.environ, OMP_NUM_THREADS=str(case["threads"]), MKL_NUM_THREADS=str(case["threads"]))
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), "--case", json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return None, last
    return json.loads(done.stdout.splitlines()[-1]), ""


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(": ", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def ours(against):
    """Seconds of LinAttn's elu by (extents, pass), from a file of results."""
    found = {}
    for group in ("main", "n_sweep"):
        for row in against.of(group, variant="elu", type="f32", mask="causal"):
            found[tuple(row.parts[5:]), row.passes] = row.seconds
    for (extents, passes), seconds in list(found.items()):
        if passes == "backward" and (extents, "forward") in found:
            found[extents, "forward_backward"] = seconds + found[extents, "forward"]
    return found


def write(options, rows, version, gpu):
    """The file of results, if one is wanted; the exit status."""
    context = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "library": f"PyTorch {version}",
        "threads": str(options.threads),
        "cpu": processor(),
    }
    if gpu:
        context["device"] = gpu
    if options.output:
        try:
            with open(options.output, "w", encoding="utf-8") as file:
                json.dump({"context": context, "benchmarks": rows}, file, indent=1)
        except OSError as error:
            print(f"peers: {options.output}: {error.strerror}", file=sys.stderr)
            return 2
    return 0 if rows else 1


def training(options):
    """Rows of the memory of training, and what PyTorch and the GPU call themselves."""
    rows, version, gpu = [], "", ""
    print(f"{'':32}{'kept, MiB':>12}")
    for batch, heads, n, d in training_shapes(options.quick):
        case = {"method": "cumsum", "pass": "training", "type": "f32", "B": batch, "H": heads, "N": n, "D": d}
        case |= {"threads": options.threads, "device": options.device}
        title = f"cumsum H{heads}/N{n}/D{d}"
        if estimated_bytes(case) > options.memory:
            print(f"{title:32}{'left out: too much memory':>23}")
            continue
        begin = time.perf_counter()
        found, why = run_case(case)
        if found is None:
            print(f"{title:32}  failed: {why}")
            continue
        version, gpu = found.pop("torch"), found.pop("gpu")
        print(f"{title:32}{found['kept_hooks'] / 2**20:12.1f}", flush=True)
        rows.append(
            {
                "name": f"memory/forward_backward/affine_cumsum/f32/causal/B{batch}/H{heads}/N{n}/D{d}/Dv{d}",
                "run_type": "iteration",
                "time_unit": "ms",
                "real_time": (time.perf_counter() - begin) * 1e3,
                **found,
            }
        )
    return rows, version, gpu


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Times the same shapes in PyTorch.")
    parser.add_argument("-o", "--output", metavar="OUT.json")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="about so long for a row")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", type=size, default="4G", help="leave out what would need more")
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument(
        "--against", metavar="FILE.json", help="results of perf/attention or perf/sweeps to compare with"
    )
    parser.add_argument("--training", action="store_true", help="the memory of training with affine attention")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("peers: PyTorch is not installed for this python3 (the package is 'torch')", file=sys.stderr)
        return 2
    if options.case:
        case = json.loads(options.case)
        print(json.dumps((measure_training if case["pass"] == "training" else measure)(case)))
        return 0
    if options.training:
        return write(options, *training(options))
    methods = options.methods.split(",")
    if unknown := [method for method in methods if method not in METHODS]:
        print(f"peers: no method '{unknown[0]}'; there are {', '.join(METHODS)}", file=sys.stderr)
        return 2
    try:
        known = ours(results.load(options.against)) if options.against else {}
    except results.UnusableFile as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2

    rows, version, gpu = [], "", ""
    print(f"{'':44}{'time, ms':>12}{'peak, MiB':>11}" + ("   over LinAttn's time" if known else ""))
    for group, batch, heads, n, d in shapes(options.quick):
        extents = (f"B{batch}", f"H{heads}", f"N{n}", f"D{d}", f"Dv{d}")
        for passes in PASSES:
            for method in methods:
                case = {
                    "method": method,
                    "pass": passes,
                    "type": "f32",
                    "B": batch,
                    "H": heads,
                    "N": n,
                    "D": d,
                    "threads": options.threads,
                    "seconds": options.seconds,
                    "device": options.device,
                }
                title = f"{method:10} {passes:17} {'/'.join(extents[1:4])}"
                if estimated_bytes(case) > options.memory:
                    print(f"{title:44}{'left out: too much memory':>23}")
                    continue
                found, why = run_case(case)
                if found is None:
                    print(f"{title:44}  failed: {why}")
                    continue
                version, gpu = found.pop("torch"), found.pop("gpu")
                seconds = found.pop("seconds")
                ratio = known.get((extents, passes))
                print(
                    f"{title:44}{seconds * 1e3:12.3f}{found['peak_bytes'] / 2**20:11.1f}"
                    + (f"{seconds / ratio:10.1f}" if ratio else ""),
                    flush=True,
                )
                variant = method if method == "softmax" else f"elu_{method}"
                rows.append(
                    {
                        "name": "/".join((group, passes, variant, "f32", "causal") + extents),
                        "run_type": "iteration",
                        "time_unit": "ms",
                        "real_time": seconds * 1e3,
                        "tokens/s": batch * heads * n / seconds,
                        **found,
                    }
                )
    return write(options, rows, version, gpu)


if __name__ == "__main__":
    sys.exit(main())
