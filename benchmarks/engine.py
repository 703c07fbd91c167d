"""How fast local training is, against the bare step, and what the rest of a round costs.

    python benchmarks/engine.py step          # (a) local training of a real round against the bare step
    python benchmarks/engine.py round         # (b, c) seconds a round by part; FedCova's ratio to FedAvg
    python benchmarks/engine.py memory        # (d) device memory over rounds, and 10,000 clients against 20
    python benchmarks/engine.py determinism   # (e) repeatable kernels on and off
    python benchmarks/engine.py devices       # (f) one run on 1, 2, 4 GPUs
    python benchmarks/engine.py methods --method fedavg rofl --rounds 20   # each against its counts of images
    python benchmarks/engine.py compiled      # what torch.compile would make of the bare step (the engine does without)
    python benchmarks/engine.py exact         # recorded against eager, lanes, resume: the same bits

The bare step is a forward pass, a backward pass and SGD on one resident batch, recorded once and replayed, with the
same batch size, precision and number of lanes in the same process: what the card can do.  Local training is the wall
time in which all clients of a round train, with loading of weights, shuffling, augmentation and odd last batches.
Images are CIFAR-10's under --data-root, or random ones of its shape: speed does not depend on what is in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from flnoisebench import provenance, runtime
from flnoisebench.api import Arrays
from flnoisebench.engine import make_deterministic
from flnoisebench.models import build_encoder
from flnoisebench.profiling import synchronise
from flnoisebench.records import RoundRecord
from flnoisebench.registry import load_dataset
from flnoisebench.settings import resolve


def images(arguments: argparse.Namespace) -> Arrays:
    draw = torch.Generator().manual_seed(0)
    count = arguments.images

    def random(n: int) -> torch.Tensor:
        return torch.randint(256, (n, 3, 32, 32), generator=draw, dtype=torch.uint8)

    if arguments.data_root is not None:  # public images are for methods that want some; which ones does not matter here
        return dataclasses.replace(load_dataset("cifar10").load(arguments.data_root), public=random(count // 5))
    labels = torch.arange(count) % 10
    return Arrays(random(count), labels, random(count // 5), labels[: count // 5], public=random(count // 5))


def device_of(arguments: argparse.Namespace) -> torch.device:
    return runtime.pick_devices(arguments.device)[0]


def bare_step(arguments: argparse.Namespace, batch: int, lanes: int, *, compiled: bool = False) -> float:
    """Images a second of the bare step on ``lanes`` streams at once; compiled: its passes fused by torch.compile."""
    device = device_of(arguments)
    steps = max(20, 20000 // batch // lanes)
    work: list[Any] = []
    kept = []  # a recording does not keep alive what it reads
    for _ in range(lanes):
        encoder = build_encoder(arguments.model, (3, 32, 32), 10)
        network = torch.nn.Sequential(encoder, torch.nn.Linear(encoder.width, 10)).to(device)
        network = network.to(memory_format=torch.channels_last)
        passes = torch.compile(network, dynamic=False) if compiled else network
        x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.arange(batch, device=device) % 10
        optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)

        def once(network: Any = passes, x: Any = x, y: Any = y, optimiser: Any = optimiser) -> None:
            optimiser.zero_grad(set_to_none=False)
            enabled = arguments.precision == "bf16"
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False):
                loss = torch.nn.functional.cross_entropy(network(x).float(), y)
            loss.backward()
            optimiser.step()

        kept.append(once)
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                for _ in range(3):
                    once()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    once()
            work.append((graph.replay, stream))
        else:
            once()
            work.append((once, None))

    def lane(step: Any, stream: Any) -> None:
        torch.set_num_threads(1)
        if stream is None:
            for _ in range(steps):
                step()
            return
        with torch.cuda.stream(stream):
            for _ in range(steps):
                step()
            stream.synchronize()

    rates = []
    for _ in range(3):
        threads = [threading.Thread(target=lane, args=one) for one in work]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(lanes * steps * batch / (time.perf_counter() - start))
    return statistics.median(rates)


def measured_run(arguments: argparse.Namespace, arrays: Arrays, rounds: int, **options: Any) -> list[RoundRecord]:
    """The records of a run on ``arrays``; options are resolve's and prepare's."""
    place = {name: options.pop(name) for name in ("lanes", "executor", "capture") if name in options}
    changes = [f"protocol.model={arguments.model}", *options.pop("changes", ())]
    settings = resolve(
        dataset="cifar10", rounds=rounds, precision=arguments.precision, changes=changes, **options
    )  # fmt: skip
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as out:
        run = runtime.prepare(
            settings, data_root=Path(out), out=Path(out), device=arguments.device, arrays=arrays, **place
        )
        run.execute(records.append)
    return records


def typical(records: list[RoundRecord], part: str, skip: int) -> float:
    return statistics.median(record.seconds.get(part, 0.0) for record in records[skip:])


def step(arguments: argparse.Namespace) -> None:
    arrays = images(arguments)
    print("batch lanes   bare img/s   local training img/s   share   full round s")
    for batch in arguments.batch:
        for lanes in arguments.lanes:
            bare = bare_step(arguments, batch, lanes)
            records = measured_run(
                arguments, arrays, arguments.rounds, method="fedavg", lanes=lanes, changes=[f"protocol.batch={batch}"]
            )
            # the wall time of all fit calls: their sum over lanes, by the lanes at work
            local = records[-1].images["trained"] / typical(records, "clients", 2)
            print(
                f"{batch:5} {lanes:5} {bare:12,.0f} {local:22,.0f} {local / bare:7.1%} "
                f"{typical(records, 'round', 2):14.3f}",
                flush=True,
            )


def compiled(arguments: argparse.Namespace) -> None:
    print("batch lanes   bare img/s   compiled img/s   times   seconds to compile and measure")
    for batch in arguments.batch:
        for lanes in arguments.lanes:
            bare = bare_step(arguments, batch, lanes)
            start = time.perf_counter()
            fused = bare_step(arguments, batch, lanes, compiled=True)
            seconds = time.perf_counter() - start
            print(f"{batch:5} {lanes:5} {bare:12,.0f} {fused:16,.0f} {fused / bare:7.2f} {seconds:9.1f}", flush=True)


def round_(arguments: argparse.Namespace) -> None:
    arrays = images(arguments)
    seconds = {}
    for method in arguments.method:
        records = measured_run(
            arguments, arrays, arguments.rounds, method=method, lanes=max(arguments.lanes), executor=arguments.executor
        )
        parts = sorted({part for record in records for part in record.seconds})
        seconds[method] = typical(records, "round", 2)
        print(f"{method}: {records[-1].images}, first round {records[0].seconds['round']:.1f} s")
        print("  " + ", ".join(f"{part} {typical(records, part, 2):.4f}" for part in parts))
        print(f"  500 rounds: {500 * seconds[method] / 60:.1f} min; accuracy {records[-1].accuracy} %", flush=True)
    if "fedavg" in seconds:
        for method, value in seconds.items():
            print(f"{method} / fedavg = {value / seconds['fedavg']:.2f}")


def inference_rate(arguments: argparse.Namespace) -> float:
    """Images a second of a forward pass without gradient, in batches of 1000 of resident images, recorded."""
    device = device_of(arguments)
    encoder = build_encoder(arguments.model, (3, 32, 32), 10).to(device).to(memory_format=torch.channels_last).eval()
    x = torch.randn(1000, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    enabled = arguments.precision == "bf16"

    def once() -> None:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False):
            encoder(x)

    step, passes = once, 5
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(3):
                once()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        step, passes = graph.replay, 100
    start = time.perf_counter()
    for _ in range(passes):
        step()
    synchronise(device)
    return passes * 1000 / (time.perf_counter() - start)


def methods(arguments: argparse.Namespace) -> None:
    """Seconds a round of each method, means over all rounds but the first two, beside what its images would take at the
    bare rates (a method with stages spends its first rounds otherwise than its last)."""
    arrays = images(arguments)
    batch, lanes = arguments.batch[0], max(arguments.lanes)
    training = bare_step(arguments, batch, lanes)
    inference = inference_rate(arguments)
    print(f"batch {batch}, {lanes} lanes: {training:,.0f} img/s in training, {inference:,.0f} without gradient")
    heads = ("s/round", "trained", "passed", "by counts", "/ 1.15 x", "/ first", "clients", "fit", "apply", "other")
    print(f"{'method':16}" + "".join(f"{head:>11}" for head in heads))
    first = None
    for method in arguments.method:
        records = measured_run(
            arguments, arrays, arguments.rounds, method=method, lanes=lanes, changes=[f"protocol.batch={batch}"]
        )[2:]
        mean = {part: statistics.fmean(record.seconds.get(part, 0.0) for record in records)
                for part in ("round", "clients", "fit", "apply")}  # fmt: skip
        trained, passed = (
            statistics.fmean(record.images[kind] for record in records) for kind in ("trained", "passed")
        )
        counts = trained / training + passed / inference
        first = first or mean["round"]
        row = (mean["round"], trained, passed, counts, mean["round"] / counts / 1.15, mean["round"] / first,
               mean["clients"], mean["fit"], mean["apply"], mean["round"] - mean["clients"])  # fmt: skip
        cells = "".join(f"{value:11,.0f}" if value > 1000 else f"{value:11.3f}" for value in row)
        print(f"{method:16}{cells}   accuracy {records[-1].accuracy} %", flush=True)


def memory(arguments: argparse.Namespace) -> None:
    arrays = images(arguments)
    device = device_of(arguments)
    settings = resolve(dataset="cifar10", method="fedavg", rounds=arguments.rounds, precision=arguments.precision,
                       changes=[f"protocol.model={arguments.model}"])  # fmt: skip
    held = []
    with tempfile.TemporaryDirectory() as out:
        run = runtime.prepare(settings, data_root=Path(out), out=Path(out), device=arguments.device, arrays=arrays,
                              lanes=max(arguments.lanes))  # fmt: skip

        def look(record: RoundRecord) -> None:
            synchronise(device)
            held.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else record.peak_memory)

        run.execute(look)
    early = min(4, len(held) - 1)
    print(f"allocated after round {early + 1}: {held[early]:,} B, after round {len(held)}: {held[-1]:,} B, "
          f"difference {held[-1] - held[early]:,} B")  # fmt: skip
    for clients, share in ((20, 1.0), (arguments.clients, 20 / arguments.clients)):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        records = measured_run(
            arguments, arrays, 4, method="fedavg", lanes=max(arguments.lanes), clients=clients,
            partition_changes={"law": "iid"}, changes=[f"protocol.participation={share}", "protocol.batch=4"],
        )  # fmt: skip
        print(f"{clients} clients, 20 a round: peak {records[-1].peak_memory:,} B", flush=True)


def determinism(arguments: argparse.Namespace) -> None:
    arrays = images(arguments)
    for on in (True, False):
        records = measured_run(
            arguments, arrays, arguments.rounds, method="fedavg", lanes=max(arguments.lanes), deterministic=on
        )
        print(f"repeatable kernels {'on' if on else 'off'}: {typical(records, 'round', 2):.3f} s a round", flush=True)
    make_deterministic()


def devices(arguments: argparse.Namespace) -> None:
    """``round`` of FedAvg on 1, 2, 4, ... cards, each in a process of its own that sees only those."""
    each = max(arguments.lanes)
    for count in (1, 2, 4, 8):
        if count > torch.cuda.device_count():
            break
        cards = ",".join(map(str, range(count)))
        print(f"{count} GPUs, {each} lanes each", flush=True)
        command = [sys.executable, __file__, "round", "--method", *arguments.method, "--device", "all"]
        command += ["--executor", arguments.executor]
        command += ["--lanes", str(count * each), "--rounds", str(arguments.rounds), "--model", arguments.model]
        command += ["--precision", arguments.precision, "--images", str(arguments.images)]
        command += ["--data-root", str(arguments.data_root)] if arguments.data_root else []
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": cards})


def exact(arguments: argparse.Namespace) -> None:
    arrays = images(arguments)
    for method in arguments.method:
        found = {}
        for name, place in (
            ("eager", {"lanes": 1, "capture": False}),
            ("recorded, 1 lane", {"lanes": 1}),
            ("recorded, 4 lanes", {"lanes": 4}),
        ):
            records = measured_run(arguments, arrays, arguments.rounds, method=method, **place)
            found[name] = records[-1].digest
            print(
                f"{method}, {name}: digest {found[name][:16]}, {typical(records, 'round', 0):.3f} s a round", flush=True
            )
        print(f"{method}: {'the same bits' if len(set(found.values())) == 1 else 'DIFFERENT BITS'}")


COMMANDS = {
    "step": step,
    "compiled": compiled,
    "round": round_,
    "memory": memory,
    "determinism": determinism,
    "devices": devices,
    "methods": methods,
    "exact": exact,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="(default: %(default)s)")
    parser.add_argument("--precision", default="bf16", help="fp32, tf32 or bf16 (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256, 512], help="(default: %(default)s)")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each run (default: %(default)s)")
    parser.add_argument("--method", nargs="+", default=["fedavg", "fedcova"], help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=10000, help="for memory (default: %(default)s)")
    parser.add_argument("--executor", default="auto", help="for round (default: %(default)s)")
    parser.add_argument("--images", type=int, default=50000, help="random training images (default: %(default)s)")
    parser.add_argument("--data-root", type=Path, help="where CIFAR-10's files lie (default: random images)")
    arguments = parser.parse_args()
    place = device_of(arguments)
    card = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    facts = {"device": card, "torch": torch.__version__, "precision": arguments.precision, "model": arguments.model,
             "commit": provenance.commit()}  # fmt: skip
    print(json.dumps(facts))
    COMMANDS[arguments.what](arguments)


if __name__ == "__main__":
    main()
