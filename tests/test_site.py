"""The page: it follows from a leaderboard, is the same bytes again, and works in a real browser without a network."""

import hashlib
import http.server
import json
import re
import shutil
import threading
from functools import partial
from importlib import resources
from pathlib import Path

import pytest
from command_line import done, refused, rows, snapshot
from leaderboard_entries import entry, saved

from flnoisebench.leaderboard import FLAGS, rows_of
from flnoisebench.leaderboard.entries import Curves
from flnoisebench.report import site

HOSTILE = "<script>document.title='taken'</script> & \"Friends\""
CARD = {
    "title": "FedCova",
    "paper": "arXiv 2603.04062",
    "year": 2026,
    "conditions": ["class second moments", "label counts"],
    "told": ["noise_rate"],
}


def run(accuracy, *, wrong=30.0, **options):
    """An entry whose given labels are ``wrong`` percent wrong."""
    return entry(accuracy, **options).model_copy(update={"label_noise_before": wrong})


def entries():
    """Two noise levels of one preset, another preset, another data set, an oracle, a failed run, a second machine."""
    found = []
    for tau, wrong in ((0.5, 20.0), (0.7, 30.0)):
        said = {"noise_changes": {"rho": 0.4, "tau": tau}, "wrong": wrong, "dataset": "digits"}
        for draw in (0, 1, 2):
            found += [
                run((50.0, 90.0 - wrong + draw), draw=draw, **said),
                run((60.0, 95.0 - wrong / 2 + draw), draw=draw, method="fedcova", card=CARD, seconds=4.0,
                    bytes_up=9000, **said),
            ]  # fmt: skip
        found.append(
            run((55.0, 88.0 - wrong), draw=0, method="fedavg-relabel", card={"title": HOSTILE}, seconds=20.0,
                environment={"device": "NVIDIA H100"}, **said)
        )  # fmt: skip
    found.append(run((99.0, 99.0), draw=0, oracle="clean-samples", **said))
    found.append(run((60.0,), draw=3, method="fedcova", card=CARD, status="failed", completed=False, **said))
    found.append(run((70.0, 71.0), draw=0, dataset="digits", noise="fedcova-asym"))
    found.append(run((30.0, 40.0), draw=0, dataset="cifar10"))
    return found


@pytest.fixture(scope="module")
def leaderboards(tmp_path_factory):
    return saved(entries(), tmp_path_factory.mktemp("leaderboards"))
