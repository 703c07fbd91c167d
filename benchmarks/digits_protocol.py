"""How the shipped digits protocol was chosen, and what it shows.

    python benchmarks/digits_protocol.py choose    # every method's learning rate, on draws 10 to 14, validation split
    python benchmarks/digits_protocol.py report    # the shipped settings, on draws 0 to 4, test set

Every method gets the same three trials.  The validation split is a fifth of each client's samples, kept out of
training and judged by true labels; test images play no part in the choice.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

METHODS = ("fedavg", "fedavg-relabel", "fedcova")
RATES = (0.01, 0.03, 0.1)


def accuracy(job: tuple[dict[str, Any], Path]) -> float:
    """Mean accuracy of the last five rounds of one run, in percent."""
    from flnoisebench import runtime
    from flnoisebench.settings import resolve

    options, out = job
    prepared = runtime.prepare(resolve(dataset="digits", **options), data_root=out, out=out, device="cpu")
    try:
        result = prepared.execute()
    except runtime.AlreadyDone as done:
        result = done.result
    assert result.accuracy.last5_mean is not None
    return result.accuracy.last5_mean


def table(rows: dict[str, list[dict[str, Any]]], out: Path, workers: int) -> dict[str, list[float]]:
    """Run everything and print one line a row: mean, standard deviation over draws, each draw."""
    jobs = [(options, out) for runs in rows.values() for options in runs]
    with ProcessPoolExecutor(workers) as pool:
        values = list(pool.map(accuracy, jobs))
    found = {}
    for name, runs in rows.items():
        found[name], values = values[: len(runs)], values[len(runs) :]
        each = " ".join(f"{value:6.2f}" for value in found[name])
        print(f"{name:<28} {statistics.fmean(found[name]):6.2f} ± {statistics.stdev(found[name]):4.2f}   {each}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "report"))
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="runs' folders (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        if arguments.what == "choose":
            table(
                {
                    f"{method} lr {rate}": [
                        {
                            "method": method,
                            "changes": [f"protocol.optimiser.lr={rate}"],
                            "draw": draw,
                            "holdout": 0.2,
                            "evaluate_on": "validation",
                        }
                        for draw in range(10, 15)
                    ]
                    for method in METHODS
                    for rate in RATES
                },
                out,
                arguments.workers,
            )
            return
        found = table(
            {
                f"{method}{name}": [{"method": method, "draw": draw, **extra} for draw in range(5)]
                for method, name, extra in (
                    ("fedavg", "", {}),
                    ("fedavg", " at lr 0.03", {"changes": ["protocol.optimiser.lr=0.03"]}),
                    ("fedavg-relabel", "", {}),
                    ("fedcova", "", {}),
                    ("fedcova", " without correction", {"preset": "no-corrector"}),
                )
            },
            out,
            arguments.workers,
        )
        for other in ("fedavg", "fedavg at lr 0.03", "fedavg-relabel"):
            paired = [a - b for a, b in zip(found["fedcova"], found[other], strict=True)]
            print(
                f"fedcova - {other}: {statistics.fmean(paired):+.2f} ± {statistics.stdev(paired):.2f} (paired by draw)"
            )


if __name__ == "__main__":
    main()
