"""Beside whom a run ran."""

import subprocess
import sys

import pytest
import torch
from fixture_methods import Averaging

from flnoisebench import profiling
from flnoisebench.testing import tiny_run

CPU = torch.device("cpu")
OTHER = """
import sys, time, torch
from flnoisebench import profiling
profiling._identity = lambda device: sys.argv[1]
shown = profiling.Presence([torch.device("cpu")])
print(shown.sharing(), flush=True)
time.sleep(600)
"""


linux = pytest.mark.skipif(not profiling.SOCKETS.exists(), reason="only Linux shows who else is there")


@linux
def test_runs_see_each_other_on_a_device_that_they_share_and_on_no_other(own_device):
    one = profiling.Presence([CPU])
    assert one.sharing() == "alone"
    elsewhere = profiling.Presence([torch.device("cpu", 1)])
    assert (one.sharing(), elsewhere.sharing()) == ("alone", "alone")
    elsewhere.close()
    both = profiling.Presence([CPU, torch.device("cpu", 1)])
    assert (one.sharing(), both.sharing()) == ("beside others", "beside others")  # on one of its two devices
    both.close()
    elsewhere = profiling.Presence([torch.device("cpu", 1)])
    both = profiling.Presence([CPU, torch.device("cpu", 1)])
    assert [run.sharing() for run in (one, elsewhere, both)] == ["beside others"] * 3
    both.close()
    assert (one.sharing(), elsewhere.sharing()) == ("alone", "alone")
    assert both.sharing() is None
    one.close()
    elsewhere.close()


@linux
def test_a_run_that_was_killed_is_gone(own_device):
    here = profiling.Presence([CPU])
    with subprocess.Popen([sys.executable, "-c", OTHER, own_device], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "beside others\n"
        assert here.sharing() == "beside others"
        other.kill()
    assert here.sharing() == "alone"
    here.close()


def test_where_runs_cannot_be_seen_nothing_is_said(own_device, monkeypatch, tmp_path):
    before = profiling.Presence([CPU])
    listing = tmp_path / "unix"
    monkeypatch.setattr(profiling, "SOCKETS", listing)
    shown = profiling.Presence([CPU])
    assert (before.sharing(), shown.sharing()) == (None, None)
    listing.write_text("Num RefCount Protocol Flags Type St Inode Path\n")  # a sandbox that lists no socket
    assert before.sharing() is None
    shown.close()
    before.close()


@linux
@pytest.mark.parametrize("call", ["bind", "__init__"])
def test_where_a_socket_cannot_be_bound_or_made_the_run_goes_on_unseen(call, own_device, monkeypatch):
    def refuse(self, *rest):
        raise PermissionError(13, "not in this sandbox")

    monkeypatch.setattr(profiling.socket.socket, call, refuse)
    shown = profiling.Presence([CPU])
    assert shown.sharing() is None
    shown.close()


@linux
def test_a_result_says_whether_another_run_was_there_in_any_of_its_rounds(own_device, tmp_path):
    alone = tiny_run(Averaging, tmp_path / "alone", rounds=2).execute()
    assert alone.environment["sharing"] == "alone"

    visitor = None

    def visit(record):
        nonlocal visitor
        if record.round == 0:
            visitor = profiling.Presence([CPU])
        elif record.round == 1:
            visitor.close()

    visited = tiny_run(Averaging, tmp_path / "visited", rounds=4).execute(on_round=visit)
    assert visited.environment["sharing"] == "beside others"
    assert visited.digest == tiny_run(Averaging, tmp_path / "again", rounds=4).execute().digest
