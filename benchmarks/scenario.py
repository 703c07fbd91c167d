"""What scenarios cost, and that their laws hold at full size.

    python benchmarks/scenario.py partitions    # 1,000,000 labels over 500 clients: seconds and memory of each law
    python benchmarks/scenario.py noise         # the same federation under each noise preset that needs no files
    python benchmarks/scenario.py draws         # how FedCova's draws scatter, plain and stratified, and the look-alikes

Each row of the first two is measured in a process of its own; memory is the peak resident size of that whole process,
libraries and labels among it.  Targets: 5 s and 1 GiB a partition.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

SAMPLES, CLIENTS, CLASSES = 1_000_000, 500, 100
SECONDS, GIB = 5.0, 1.0
DRAWS = 200


def peak() -> float:
    """GiB of resident memory at the worst so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def partition(law: str) -> tuple[float, float]:
    from flnoisebench.scenario import Partition, split

    labels = np.random.default_rng(0).integers(0, CLASSES, SAMPLES)
    start = time.perf_counter()
    owner = split(Partition(law=law), labels, CLASSES, CLIENTS, ("benchmark", 0))
    seconds = time.perf_counter() - start
    assert np.bincount(owner, minlength=CLIENTS).sum() == SAMPLES
    return seconds, peak()


def noise(preset: str) -> tuple[float, float]:
    from flnoisebench.scenario import NOISE_PRESETS, Partition, Sources, corrupt, split

    law, rng = NOISE_PRESETS[preset][0], np.random.default_rng(0)
    classes = 10 if law.target == "map" and "100" not in law.class_map else CLASSES
    labels = rng.integers(0, classes, SAMPLES)
    images = rng.integers(0, 256, (SAMPLES, 1, 8, 8), dtype=np.uint8) if law.target == "instance" else None
    sources = Sources(images=images)
    owner = split(Partition(law="dirichlet"), labels, classes, CLIENTS, ("benchmark", 0))
    start = time.perf_counter()
    corrupt(law, labels, owner, classes, CLIENTS, ("benchmark", 0), sources)
    return time.perf_counter() - start, peak()


def alone(kind: str, name: str) -> tuple[float, float]:
    """The measurement in a process of its own."""
    done = subprocess.run([sys.executable, __file__, kind, name], capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    return seconds, memory


def draws() -> None:
    from flnoisebench.scenario import NOISE_PRESETS, PRESET_PARTITIONS, Partition, ScenarioSpec, build

    labels = np.repeat(np.arange(10), 5000)
    print(f"realised share of wrong labels in {DRAWS} draws, 50,000 labels, 20 clients, %")
    for name in NOISE_PRESETS:
        if not name.startswith(("fedcova-sym", "fedcova-paper")):
            continue
        rates, start = [], time.perf_counter()
        for draw in range(DRAWS):
            cut = PRESET_PARTITIONS.get(name, Partition())
            spec = ScenarioSpec(
                dataset="cifar10", noise=NOISE_PRESETS[name][0], noise_name=name, partition=cut, draw=draw
            )
            scene, truth = build(spec, labels, 10, "")
            rates.append(100 * float((scene.given != truth.true).mean()))
        each = (time.perf_counter() - start) / DRAWS
        print(
            f"{name:26}{np.mean(rates):7.2f} +- {np.std(rates):5.2f}   {min(rates):6.2f} to {max(rates):6.2f}", end=""
        )
        print(f"   {1000 * each:5.0f} ms a draw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("partitions", "noise", "draws"))
    parser.add_argument("name", nargs="?", help="one law alone, in this process: its seconds and GiB")
    chosen = parser.parse_args()
    if chosen.what == "draws":
        draws()
        return
    measure = partition if chosen.what == "partitions" else noise
    if chosen.name:
        print(*measure(chosen.name))
        return
    from flnoisebench.scenario import NOISE_PRESETS

    names = ["iid", "dirichlet", "bernoulli-dirichlet", "shards", "classes", "quantity"]
    if chosen.what == "noise":
        needs_files = ("human", "twin", "open-set")
        # The look-alikes are of draws of 20 clients: 500 scatter too little to come near.
        names = [
            name
            for name, (law, _) in NOISE_PRESETS.items()
            if law.target not in needs_files and isinstance(law.mass, str)
        ]
    print(f"{SAMPLES:,} labels, {CLIENTS} clients, {CLASSES} classes (10 for maps of ten)")
    for name in names:
        seconds, memory = alone(chosen.what, name)
        missed = chosen.what == "partitions" and (seconds > SECONDS or memory > GIB)
        print(f"{name:26}{seconds:7.2f} s  {memory:6.2f} GiB{'   misses its target' if missed else ''}")


if __name__ == "__main__":
    main()
