"""Every method on one data set, several draws and noise levels, in one table.

    python benchmarks/methods.py --dataset digits --workers 2
    python benchmarks/methods.py --dataset fashion-mnist --data-root DATA --device cuda --workers 4 --noise 0.4,0.5

Each method with its default preset in the track common; the same draws for all, so that differences are paired.  A
second call with the same --out runs what is missing and prints the table anew.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from flnoisebench import records, runtime
from flnoisebench.settings import resolve

PAPER = ("fedavg", "fedcova", "rofl", "fedcorr", "fednoro", "fedned", "fedned-minus", "coteaching", "dividemix")
REFERENCES = ("fedavg-decay", "fedavg-ema", "fedavg-gce", "fedavg-la", "fedavg-mixup", "fedavg-relabel")
JUDGED = ("clients_precision", "clients_recall", "samples_precision", "samples_recall", "relabel_precision")


def one(options: dict[str, Any], place: dict[str, Any]) -> Path:
    """Carry one run to its end, wherever it was stopped; its folder."""
    prepared = runtime.prepare(resolve(**options), **place)
    with contextlib.suppress(runtime.AlreadyDone):
        prepared.execute()
    return prepared.folder


def row(method: str, folders: list[Path], reference: list[float]) -> str:
    results = [records.load_result(folder) for folder in folders]
    last = [records.LastRounds.of(records.load_records(folder)) for folder in folders]
    values = [result.accuracy.last5_mean or 0.0 for result in results]
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    against = statistics.fmean(a - b for a, b in zip(values, reference, strict=True))
    judged = []
    for name in JUDGED:
        known = [one.judged[name] for one in last if name in one.judged]
        judged.append(f"{statistics.fmean(known):5.1f}" if known else "    -")
    seconds = statistics.fmean(result.seconds["round"] for result in results)
    after = [result.label_noise_after for result in results if result.label_noise_after is not None]
    traffic = statistics.fmean(result.bytes_up + result.bytes_down for result in results) / 1e6
    return (
        f"{method:16} {statistics.fmean(values):6.2f} ± {spread:5.2f} {against:+7.2f}  "
        f"{statistics.fmean(after):5.1f}  {'  '.join(judged)}  {seconds:7.1f} {traffic:9.1f}   "
        + " ".join(f"{value:.2f}" for value in values)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits", help="(default: %(default)s)")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="runs' folders (default: %(default)s)")
    parser.add_argument(
        "--method", nargs="+", default=[*PAPER, *REFERENCES], help="the first is what others are set against"
    )
    parser.add_argument("--noise", nargs="+", default=["0.4,0.5", "0.6,0.7"], help="rho,tau (default: %(default)s)")
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="(default: the protocol's)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--lanes", type=int, help="clients at once in a run (default: as `flnoisebench run`)")
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default: %(default)s)")
    arguments = parser.parse_args()
    place = {
        "data_root": arguments.data_root, "out": arguments.out, "device": arguments.device, "lanes": arguments.lanes,
    }  # fmt: skip
    grid = {
        (noise, method, draw): {
            "dataset": arguments.dataset, "method": method, "draw": draw, "rounds": arguments.rounds,
            "noise_changes": dict(zip(("rho", "tau"), map(float, noise.split(",")), strict=True)),
            "precision": "fp32",
        }
        for noise in arguments.noise for method in arguments.method for draw in arguments.draws
    }  # fmt: skip
    folders: dict[Any, Path] = {}
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(one, options, place): key for key, options in grid.items()}
        for future in as_completed(waiting):
            try:
                folders[waiting[future]] = future.result()
            except Exception as error:  # a failed run is a row without that draw, not the end of the table
                print(f"{waiting[future]}: {str(error).splitlines()[0]}", flush=True)
    for noise in arguments.noise:
        print(f"\n{arguments.dataset}, (rho, tau) = ({noise}), draws {arguments.draws}, {arguments.device}")
        print(f"{'method':16} accuracy, %       paired  noise  {'  '.join(name[:5] for name in JUDGED)}  seconds  MB")
        print(f"{'':16} {'':15} to first  after  {', '.join(JUDGED)}")
        for method in arguments.method:
            draws = [draw for draw in arguments.draws if (noise, method, draw) in folders]
            base = [draw for draw in draws if (noise, arguments.method[0], draw) in folders]
            if base:
                first = [
                    records.load_result(folders[noise, arguments.method[0], draw]).accuracy.last5_mean or 0.0
                    for draw in base
                ]
                print(row(method, [folders[noise, method, draw] for draw in base], first), flush=True)


if __name__ == "__main__":
    main()
