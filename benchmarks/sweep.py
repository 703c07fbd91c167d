"""What a sweep costs beyond its runs, how it spreads over GPUs, and how fast a folder of runs is listed.

    python benchmarks/sweep.py overhead              # CPU: one worker against the same runs one after the other
    python benchmarks/sweep.py list                  # 10,000 finished runs
    python benchmarks/sweep.py gpus --cards 1 2 4    # the same runs on so many GPUs of this host

Needs an installed flnoisebench[sweep], no checkout, no network and no data: the GPUs train on random images.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from flnoisebench import runs, runtime, sweep
from flnoisebench.settings import Settings, from_options


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def timed(wanted: list[Settings], place: sweep.Place, **options: Any) -> tuple[list[sweep.Outcome], float, float]:
    """(outcomes, seconds, those of them from the first run's beginning on) of a sweep in which every run completes."""
    began: list[float] = []

    def watch(standing: sweep.Standing) -> None:
        if standing.status == "running" and not began:
            began.append(time.perf_counter())

    started = time.perf_counter()
    outcomes = sweep.Sweep(wanted, place=place, on_change=watch, **options).carry_out()
    ended = time.perf_counter()
    failed = [outcome.failure for outcome in outcomes if outcome.status != "complete"]
    assert not failed, failed
    return outcomes, ended - started, ended - began[0]


def overhead(folder: Path, count: int, rounds: int) -> None:
    """Seconds a run that one worker takes longer than this process, warm; its start is told apart."""
    wanted = [
        from_options({"method": "fedavg", "rounds": rounds, "seed": seed}, device="cpu") for seed in range(count + 1)
    ]
    runtime.prepare(wanted.pop(), data_root=folder, out=folder / "warm", device="cpu").execute()
    alone = []
    for run in wanted:
        started = time.perf_counter()
        runtime.prepare(run, data_root=folder, out=folder / "serial", device="cpu").execute()
        alone.append(time.perf_counter() - started)
    _, seconds, without_start = timed(wanted, sweep.Local(workers=1), out=folder / "sweep", data_root=folder)
    say(
        what="overhead",
        runs=count,
        rounds=rounds,
        seconds_a_run_alone=statistics.fmean(alone),
        seconds_a_run_in_the_sweep=without_start / count,
        overhead_a_run=(without_start - sum(alone)) / count,
        overhead_a_run_with_the_start=(seconds - sum(alone)) / count,
        start=seconds - without_start,
    )


def listing(folder: Path, count: int) -> None:
    """Seconds for ``runs.below`` on copies of one real run's files."""
    run = from_options({"method": "fedavg", "rounds": 20}, device="cpu")
    prepared = runtime.prepare(run, data_root=folder, out=folder / "one", device="cpu")
    prepared.execute()
    for number in range(count):
        copy = (
            folder / "many" / "data" / f"scenario{number % 7}" / f"method{number % 11}" / "key" / f"draw0-seed{number}"
        )
        (copy / "checkpoint" / "objects").mkdir(parents=True)
        for name in ("settings.json", "records.jsonl", "result.json"):
            shutil.copyfile(prepared.folder / name, copy / name)
    for state in ("first", "again"):
        started = time.perf_counter()
        found = runs.below(folder / "many")
        assert len(found) == count
        assert {one.status for one in found} == {"complete"}
        say(what="list", runs=count, time=state, seconds=time.perf_counter() - started)


def gpus(folder: Path, cards: list[int], count: int, rounds: int, images: int, runs_per_gpu: int) -> None:
    """The same runs (ResNet-18, 20 clients, random 32x32 images) on so many cards; speed-up over the first, with the
    workers' start and without it (the first run's beginning to the last run's end)."""
    random_images(folder / "data", images)
    wanted = [
        from_options(
            {"method": "fedavg", "dataset": "folder", "protocol": "cifar10", "noise": "clean", "partition": "iid",
             "rounds": rounds, "seed": seed},
            device="cuda",
        )
        for seed in range(count)
    ]  # fmt: skip
    first: tuple[float, float] | None = None
    visible = sweep.visible_cards()
    digests: list[list[str]] = []
    for number in cards:
        if number > len(visible):
            raise SystemExit(f"{number} GPUs are wanted, and {len(visible)} are here")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:number])
        out = folder / f"on{number}"
        place = sweep.Local(device="cuda", runs_per_gpu=runs_per_gpu)
        outcomes, seconds, without_start = timed(wanted, place, out=out, data_root=folder / "data", device="cuda")
        digests.append([digest_of(run, out) for run in wanted])
        first = first or (seconds, without_start)
        say(
            what="gpus",
            cards=number,
            runs_per_gpu=runs_per_gpu,
            runs=count,
            rounds=rounds,
            seconds=seconds,
            seconds_without_start=without_start,
            speed_up=first[0] / seconds,
            speed_up_without_start=first[1] / without_start,
            seconds_of_rounds_a_run=statistics.fmean(outcome.seconds for outcome in outcomes),
            same_digests=digests[-1] == digests[0],
        )


def digest_of(run: Settings, out: Path) -> str:
    return json.loads((run.folder(out) / "result.json").read_text())["digest"]


def random_images(root: Path, count: int) -> None:
    """An image folder of ten classes, with a tenth as many test images."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    # not the data set's usual 64 pixels, which are four times the work
    (root / "flnoisebench.json").write_text(json.dumps({"size": 32}))
    for part, many in (("train", count), ("test", count // 10)):
        for number in range(many):
            place = root / part / f"class{number % 10}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "list", "gpus"))
    parser.add_argument("--runs", type=int, help="how many (default: 20; 10,000 to list; 8 on GPUs)")
    parser.add_argument("--rounds", type=int, help="of each run (default: 20; 100 on GPUs)")
    parser.add_argument(
        "--cards", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs (default: %(default)s)"
    )
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=10_000, help="training images on GPUs (default: %(default)s)")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if said.what == "overhead":
            overhead(folder, said.runs or 20, said.rounds or 20)
        elif said.what == "list":
            listing(folder, said.runs or 10_000)
        else:
            gpus(folder, said.cards, said.runs or 8, said.rounds or 100, said.images, said.runs_per_gpu)


if __name__ == "__main__":
    main()
