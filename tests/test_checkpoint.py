"""The checkpoint by itself: what is saved comes back, nothing is written twice, nothing is left over."""

import errno
import fcntl
import hashlib
import json
import os
import threading

import pytest
import torch

from flnoisebench import checkpoint, trees
from flnoisebench.checkpoint import BEGAN_WITH, Busy, Checkpoint, Commit, Damaged, Overwritten


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def saved(folder, *commits):
    held = Checkpoint(folder)
    held.load()
    for commit in commits:
        held.save(commit)
    held.close()


def loaded(folder):
    held = Checkpoint(folder)
    try:
        return held.load()
    finally:
        held.close()


def objects(folder):
    return {path.name for path in (folder / "checkpoint" / "objects").iterdir()}


def commit(number=0, **changes):
    fields = {
        "server": {"w": torch.full((3,), float(number))},
        "clients": {0: {"n": number}, 7: None},
        "claims": {7: {"noisy": True}},
        "counters": {"round": number, "share": 0.1, "open": {"notes": {"x": [1, "é", None]}}},
        "record": f'{{"round": {number}}}',
    }
    return Commit(**{**fields, **changes})


def test_an_empty_folder_has_no_commit(folder):
    assert loaded(folder) is None


def test_the_last_commit_comes_back_whole_and_records_pile_up(folder):
    saved(folder, *map(commit, range(4)))
    found = loaded(folder)
    assert trees.digest(found.server) == trees.digest(commit(3).server)
    assert found.clients == {0: {"n": 3}, 7: None}
    assert found.claims == {7: {"noisy": True}}
    assert found.counters == commit(3).counters
    assert [json.loads(line)["round"] for line in (folder / "records.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_commit_without_a_record_adds_no_line(folder):
    saved(folder, commit(0, record=None), commit(1), commit(2, record=None))
    assert (folder / "records.jsonl").read_text() == '{"round": 1}\n'


def test_objects_are_named_by_their_content_and_what_is_not_needed_is_swept(folder):
    saved(folder, *map(commit, range(3)))
    head = json.loads((folder / "checkpoint" / "head.json").read_text())
    places = [head["server"], *head["clients"].values(), *head["claims"].values()]
    assert objects(folder) == {name for name, _ in places}
    for name in objects(folder):
        data = (folder / "checkpoint" / "objects" / name).read_bytes()
        assert name == hashlib.sha256(data).hexdigest()


def test_what_did_not_change_is_not_written_again(folder, monkeypatch):
    wrote, real = [], checkpoint.replace
    monkeypatch.setattr(checkpoint, "replace", lambda path, data: (wrote.append(path.name), real(path, data)))
    state, other = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    saved(
        folder, commit(0, server=state, clients={0: other}), commit(1, server={"w": torch.ones(3)}, clients={0: other})
    )
    assert wrote.count("head.json") == 2
    assert len(wrote) == 2 + 3  # server, client, claims once; an equal state in another object is the same file


def test_equal_states_of_two_clients_are_one_object_and_survive_as_two(folder):
    same = {"w": torch.ones(3)}
    saved(
        folder,
        commit(0, clients={0: same, 1: {"w": torch.ones(3)}}),
        commit(1, clients={0: {"w": torch.zeros(3)}, 1: same}),
    )
    found = loaded(folder)
    assert found.clients[0]["w"].tolist() == [0, 0, 0]
    assert found.clients[1]["w"].tolist() == [1, 1, 1]


def test_saving_happens_behind_the_callers_back_and_waits_for_the_one_before(folder, monkeypatch):
    real, head, gates = checkpoint.replace, folder / "checkpoint" / "head.json", [threading.Event(), threading.Event()]

    def committed():
        return json.loads(head.read_text())["counters"]["round"] if head.exists() else None

    def held_back(path, data):
        assert threading.current_thread().name == "checkpoint"
        assert gates[0 if committed() is None else 1].wait(60)
        real(path, data)

    monkeypatch.setattr(checkpoint, "replace", held_back)
    held = Checkpoint(folder)
    held.load()
    held.save(commit(0))
    assert committed() is None
    threading.Timer(0.05, gates[0].set).start()
    held.save(commit(1))
    assert committed() == 0  # one commit behind at most
    gates[1].set()
    held.close()
    assert loaded(folder).counters["round"] == 1


@pytest.mark.parametrize("last", [False, True])
def test_a_failure_in_the_background_is_raised_by_the_next_call_and_the_head_stays(last, folder, monkeypatch):
    saved(folder, commit(0))
    held = Checkpoint(folder)
    held.load()

    def broken(path, data):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint, "replace", broken)
    held.save(commit(1))
    with pytest.raises(OSError, match=r"cannot write the checkpoint in .*Input/output error.*resume"):
        held.close() if last else held.save(commit(2))
    if not last:
        held.close()
    monkeypatch.undo()
    assert loaded(folder).counters["round"] == 0  # and nobody holds the folder any more


def test_what_is_discarded_is_gone_and_the_same_trees_are_written_anew(folder):
    began = folder / "checkpoint" / "data.json"
    held, first = Checkpoint(folder), commit(0, record=None)
    began.write_text('{"data": "those of the first beginning"}')
    held.save(first)
    held.wait()
    held.discard()
    held.close()
    assert loaded(folder) is None
    assert not objects(folder)

    held = Checkpoint(folder)
    for data in ("others", "others still"):  # the second beginning is in the same process
        began.write_text(f'{{"data": "{data}"}}')
        held.save(first)
        held.wait()
        if data == "others":
            held.discard()
    held.close()
    assert trees.digest(loaded(folder).server) == trees.digest(first.server)


def test_a_tree_written_in_place_while_it_is_saved_is_refused_and_the_commit_before_stays(folder, monkeypatch):
    saved(folder, commit(0))
    held, gate, real = Checkpoint(folder), threading.Event(), trees.to_bytes
    held.load()
    monkeypatch.setattr(trees, "to_bytes", lambda tree: (gate.wait(5), real(tree))[1])
    state = {"w": torch.ones(3)}
    held.save(commit(1, server=state))
    state["w"].add_(1)
    gate.set()
    with pytest.raises(Overwritten, match=r"server: .*written in place while it was being saved"):
        held.wait()
    held.close()
    assert loaded(folder).counters["round"] == 0


def test_one_folder_is_held_by_one_at_a_time(folder):
    first = Checkpoint(folder)
    with pytest.raises(Busy, match="another process is running"):
        Checkpoint(folder)
    first.close()
    Checkpoint(folder).close()


def test_a_file_system_without_locks_is_not_taken_for_another_process(folder, monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="its file system gives no lock \\(No locks available\\)"):
        Checkpoint(folder)


def test_what_a_commit_that_did_not_come_left_behind_is_gone_once_the_last_one_is_loaded(folder):
    saved(folder, commit(0))
    whole = objects(folder)
    with open(folder / "records.jsonl", "a") as file:
        file.write('{"round": 1}\n{"rou')
    for name in ("objects/half", "head.json.tmp"):
        (folder / "checkpoint" / name).write_bytes(b"written by")
    loaded(folder)
    assert (folder / "records.jsonl").read_text() == '{"round": 0}\n'
    assert objects(folder) == whole
    assert not (folder / "checkpoint" / "head.json.tmp").exists()


def test_every_bit_of_the_head_is_protected(folder):
    saved(folder, commit(3))
    path = folder / "checkpoint" / "head.json"
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(Damaged, match=r"head\.json|objects"):
            loaded(folder)
        assert path.read_bytes()[:place] == good[:place]
    path.write_bytes(good)
    assert loaded(folder).counters["round"] == 3


def test_every_bit_of_the_records_and_of_what_the_run_began_with_is_protected(folder):
    held = Checkpoint(folder)
    for name in BEGAN_WITH:
        (folder / "checkpoint" / name).write_text(f'"{name}"')
    held.save(commit(0))
    held.save(commit(1))
    held.close()
    saved(folder, commit(2))  # resumed, it counts on from the sum that it found
    for path in (folder / "records.jsonl", *(folder / "checkpoint" / name for name in BEGAN_WITH)):
        good = path.read_bytes()
        for place in range(len(good)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(Damaged, match=rf"{path} was altered"):
                loaded(folder)
        path.write_bytes(good)
    assert loaded(folder).counters["round"] == 2


def test_a_checkpoint_of_before_there_were_such_sums_is_read_and_has_them_after_the_next_commit(folder):
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "data.json").write_text("{}")
    saved(folder, commit(0))
    path = folder / "checkpoint" / "head.json"
    head = json.loads(path.read_text())
    whole = set(head)
    for name in ("sha256", "records_sha256", "began_with"):
        del head[name]
    path.write_text(json.dumps({**head, "sha256": hashlib.sha256(json.dumps(head).encode()).hexdigest()}))
    saved(folder, commit(1))
    head = json.loads(path.read_text())
    assert set(head) == whole
    assert head["records_sha256"] == hashlib.sha256((folder / "records.jsonl").read_bytes()).hexdigest()
    assert head["began_with"] == {"data.json": hashlib.sha256(b"{}").hexdigest()}
    assert loaded(folder).counters["round"] == 1


def test_every_bit_of_an_object_is_protected(folder):
    saved(folder, commit(3))
    head = json.loads((folder / "checkpoint" / "head.json").read_text())
    path = folder / "checkpoint" / "objects" / head["server"][0]
    good = path.read_bytes()
    for place in range(0, len(good), 5):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(Damaged, match=r"server.*SHA-256"):
            loaded(folder)
    assert os.path.exists(path)


def test_a_thousand_clients_with_one_changing_cost_one_object_a_commit(folder, monkeypatch):
    wrote, real = [], checkpoint.replace
    clients = {i: {"w": torch.tensor([float(i)])} for i in range(1000)}
    saved(folder, commit(0, clients=clients))
    held = Checkpoint(folder)
    base = held.load()
    monkeypatch.setattr(checkpoint, "replace", lambda path, data: (wrote.append(path.name), real(path, data)))
    held.save(Commit(base.server, {**base.clients, 5: {"w": torch.tensor([-1.0])}}, base.claims, {"round": 1}))
    held.close()
    assert len(wrote) == 2
    assert loaded(folder).clients[5]["w"].item() == -1
