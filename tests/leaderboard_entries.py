"""Entries for the leaderboard's tests, made by hand: every number in them is the test's own."""

from flnoisebench.leaderboard import Entry
from flnoisebench.leaderboard.entries import Curves
from flnoisebench.records import LastRounds
from flnoisebench.settings import resolve

ENVIRONMENT = {
    "packages": {"torch": "2.9.0", "numpy": "2.0.0", "flnoisebench": "0.1.0"},
    "commit": "c" * 40,
    "method_sha256": "5" * 64,
    "device": "cpu",
    "devices": 1,
    "processor": "Abacus 3000",
    "executor": "serial",
    "lanes": 1,
    "system": "Linux x86_64",
}


def entry(
    accuracy=(50.0, 60.0),
    *,
    method="fedavg",
    draw=0,
    status="complete",
    seconds=1.0,
    images=100,
    bytes_up=1000,
    bytes_down=1000,
    peak_memory=1000,
    judged=None,
    environment=None,
    digests=None,
    digest=None,
    card=None,
    completed=True,
    **settings,
):
    """One run with these accuracies by round.  settings: as ``resolve`` takes them."""
    rounds = len(accuracy)
    resolved = resolve(method=method, draw=draw, rounds=rounds if completed else rounds + 1, **settings)
    where = f"{resolved.scenario.slug}{draw}"
    return Entry(
        status=status,
        failure=None if status == "complete" else "it broke",
        settings=resolved,
        card={"title": method.title(), "paper": "", "year": 2025, "conditions": [], "told": [], **(card or {})},
        told={},
        digests=digests or {"data": "d" * 64, "partition": f"p{where}", "labels": f"l{where}"},
        last5=LastRounds(
            balanced_accuracy=None, macro_f1=None, calibration_error=None, recall=None, predictors={},
            judged=judged or {}, diagnostics={},
        ),
        label_noise_before=30.0,
        label_noise_after=20.0,
        rounds=rounds,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        images={"trained": images * rounds, "passed": 7, "skipped": 0},
        seconds={"round": seconds * rounds},
        peak_memory=peak_memory,
        digest=digest or f"{method}{draw}".ljust(64, "f"),
        environment={**ENVIRONMENT, **(environment or {})},
        curves=Curves(
            accuracy=list(accuracy),
            label_noise=[20.0] * rounds,
            images=[images] * rounds,
            seconds=[seconds] * rounds,
        ),
    )  # fmt: skip


def only(entries):
    """The one row of these entries."""
    from flnoisebench.leaderboard import rows_of

    (row,) = rows_of(entries)
    return row


def saved(entries, folder):
    """A leaderboard's folder with these entries and the tables that follow."""
    from flnoisebench.leaderboard.entries import save
    from flnoisebench.leaderboard.rows import csv_text, rows_of

    for one in entries:
        save(one, folder)
    tables = {}
    for row in rows_of(entries):
        tables.setdefault(row.dataset, []).append(row)
    for dataset, rows in tables.items():
        (folder / f"{dataset}.csv").write_text(csv_text(rows))
    return folder
