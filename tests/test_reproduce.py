"""The paper as commands: every table and figure is there, ours stands beside what is printed, and claims are judged by
intervals, not by looks."""

import json
import sys
import tomllib
from collections import Counter
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import leaderboard_entries
import pytest
import torch
from command_line import call, done, refused, rows

from flnoisebench import claims, papers, published, records, registry, reproduce, runtime
from flnoisebench.cli.reproduce import _cells as cells_of
from flnoisebench.cli.reproduce import _closest as closest_of
from flnoisebench.cli.reproduce import _failed as failed_of
from flnoisebench.leaderboard import board
from flnoisebench.reproduce import Line

NOWHERE = Path("no-data")


pytestmark = pytest.mark.usefixtures("one_thread")


def finished(entry, out, draws=None):
    runs = reproduce.wanted(entry, device="cpu", draws=draws)
    assert reproduce.carry_out(runs, data_root=NOWHERE, out=out, device="cpu") == {}
    return runs


# ------------------------------------------------------------------------------------------------- the data


def test_every_table_and_figure_of_the_paper_has_a_name():
    assert list(reproduce.entries()) == [
        "cifar10-symmetric", "cifar10-asymmetric", "cifar100", "clothing1m", "ablation", "runtime", "learning-curves",
        "orthogonality", "correction", "correction-clients", "eps2", "alpha", "d", "communication", "heterogeneity",
        "partition", "noise", "toy-densities", "toy-projections",
    ]  # fmt: skip
    listed = rows(done("reproduce", "list"))
    assert list(listed) == [*reproduce.entries(), "claims"]
    assert listed["cifar10-symmetric"] == "CIFAR-10, symmetric noise (table); 162 runs"  # 9 methods, 6 levels, 3 draws
    assert rows(done("reproduce", "list", "--draws", 1))["cifar10-symmetric"].endswith("; 54 runs")


def test_a_papers_file_has_no_key_that_nobody_reads():
    content = tomllib.loads(resources.files(papers).joinpath("fedcova.toml").read_text())
    known = {
        "name", "title", "show", "table", "lines", "options", "levels", "over", "statements", "stated",
        *reproduce.SCALES,
    }  # fmt: skip
    for entry in content["entries"]:
        assert set(entry) <= known, entry["name"]
        assert entry["show"] in reproduce.SHOWN
        for scale in reproduce.SCALES:
            assert set(entry.get(scale, {})) <= {"options", "levels", "lines"}
        for one in entry.get("stated", ()):
            assert set(one) <= {"level", "line", "measure", "what", "setting", "unit"}
            assert one["measure"] in reproduce.SHOWN[entry["show"]]
    assert set(content["scales"]) == set(reproduce.SCALES)
    for claim in content["claims"]:
        assert set(claim) <= {"name", "text", "judge", "entries", "line", "measure", "within", "limit"}
        for name in claim.get("entries", ()):
            assert claim["line"] in reproduce.entry(name).lines
            assert claim["measure"] in reproduce.MEASURES


@pytest.mark.parametrize("scale", reproduce.SCALES)
def test_every_run_of_every_entry_has_valid_settings(scale):
    for entry in reproduce.entries(scale).values():
        for run in reproduce.wanted(entry, device="cpu", draws=1):
            assert run.settings.scenario.draw == 0
            assert run.settings.track == "common"


def test_scales_change_the_length_and_keep_the_schedules_shape():
    lengths = {}
    for scale in reproduce.SCALES:
        for name in ("cifar10-symmetric", "clothing1m"):
            entry = reproduce.entry(name, scale)
            settings = entry.settings("fedcova", next(iter(entry.levels)), 0, device="cuda")
            lengths[scale, name] = settings.protocol.rounds
    assert lengths == {
        ("paper", "cifar10-symmetric"): 500, ("paper", "clothing1m"): 50,
        ("short", "cifar10-symmetric"): 120, ("short", "clothing1m"): 12,
        ("smoke", "cifar10-symmetric"): 12, ("smoke", "clothing1m"): 12,
    }  # fmt: skip
    short = reproduce.entry("cifar10-symmetric", "short").settings("fedcova", "rho=0.6 tau=0.7", 0, device="cuda")
    assert short.method_settings["correct_start"] == 0.4
    assert short.protocol.precision == "bf16"
    half = reproduce.entry("cifar10-symmetric").settings("fedned", "rho=0.6 tau=0.7", 0, device="cuda")
    assert half.protocol.participation == 0.5  # the paper's exception


def test_each_cell_of_the_papers_tables_stands_beside_one_line_of_ours():
    found = Counter()
    for entry in reproduce.entries().values():
        if entry.show == "accuracy":
            for level, said in entry.levels.items():
                for line in entry.lines:
                    number = reproduce.printed(entry, line, level, "accuracy")
                    found[entry.table, said.get("rho", 0.6), said.get("tau", 0.7), line, number] += 1
    wanted = Counter(
        (cell["table"], float(cell["rho"] or 0.6), float(cell["tau"] or 0.7), cell["method"], float(cell["accuracy"]))
        for cell in published.read("fedcova_tables")
    )
    assert found == wanted
    assert sum(wanted.values()) == 54 + 42 + 42 + 6 + 6


def test_what_the_text_states_stands_beside_ours():
    def stated(name, measure, line="fedcova"):
        entry = reproduce.entry(name)
        return [reproduce.printed(entry, line, level, measure) for level in entry.levels]

    assert stated("correction", "noise before") == [27.51, 34.42]
    assert stated("correction", "noise after") == [6.93, 11.20]
    assert stated("heterogeneity", "noise after") == [11.20, 18.16]
    assert stated("noise", "noise before", "") == [None, 27.51, None, 34.42, None, None]
    assert stated("communication", "covariances, share of FedAvg's upload") == [1.4]
    assert stated("communication", "covariances of a client") == [0.6]
    assert stated("communication", "covariances of a client", "fedavg") == [None]
    assert stated("runtime", "minutes", "dividemix") == [1508]
    assert stated("runtime", "time ratio") == [1.61]
    assert len(reproduce.statements(reproduce.entry("eps2"))) == 4
    assert reproduce.number_in("163,840 = 1.4 % of 11.2 million", "%") == 1.4
    with pytest.raises(ValueError, match="no number in MB"):
        reproduce.number_in("27.51 %", "MB")


def test_ratios_of_run_times_are_said_to_need_a_machine_of_their_own():
    assert "of runs that shared card and cores with no other" in reproduce.notes(reproduce.entry("runtime"), [])[0]


def test_an_unknown_name_gets_near_misses():
    assert "Did you mean ablation" in refused("reproduce", "ablaton")
    assert "Did you mean smoke?" in refused("reproduce", "list", "--scale", "smok")
    with pytest.raises(registry.UnknownName, match="Did you mean fedcova"):
        papers.read("fedcov")
    assert "leave it out" in refused("reproduce", "all", "--figure", "a.svg")
    assert "a figure's name ends in" in refused("reproduce", "ablation", "--figure", "a.gif")
    for name in ("ablation", "claims"):
        assert f"{name} is drawn as none; leave it out" in refused("reproduce", name, "--figure", "a.svg")


# ------------------------------------------------------------------------------------------------- the runs


def test_what_is_over_is_not_run_again_and_what_was_stopped_goes_on(tmp_path, monkeypatch):
    entry = reproduce.entry("correction", "smoke")
    runs = reproduce.wanted(entry, device="cpu")
    assert [run.level for run in runs] == ["rho=0.4 tau=0.7", "rho=0.6 tau=0.7"]

    def stop(record):
        if record.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.prepare(runs[0].settings, data_root=NOWHERE, out=tmp_path, device="cpu").execute(stop)
    started = []
    options = {"data_root": NOWHERE, "out": tmp_path, "device": "cpu"}
    assert reproduce.carry_out(runs, **options, on_start=lambda *said: started.append(said)) == {}
    assert [(i, of, run.level) for i, of, run in started] == [(0, 2, runs[0].level), (1, 2, runs[1].level)]
    monkeypatch.setattr(runtime, "prepare", None)  # nothing is left to prepare
    assert reproduce.carry_out(runs, **options) == {}
    whole = tmp_path / "whole"
    monkeypatch.undo()
    reproduce.carry_out(runs[:1], data_root=NOWHERE, out=whole, device="cpu")
    (again,), (first, _) = reproduce.present(runs, whole), reproduce.present(runs, tmp_path)
    assert again.result.digest == first.result.digest


def test_another_runs_result_is_not_shown(tmp_path):
    runs = finished(reproduce.entry("correction", "smoke"), tmp_path)
    first, second = (run.settings.folder(tmp_path) / "result.json" for run in runs)
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"result\.json is of another run"):
        reproduce.present(runs, tmp_path)
    said = refused("reproduce", "correction", "--scale", "smoke", "--device", "cpu", "--out", tmp_path)
    assert f"{first} is of another run" in said


def test_runs_that_entries_share_are_run_once(tmp_path):
    paper = reproduce.entries("paper")

    def folders(name):
        return {run.settings.folder(tmp_path) for run in reproduce.wanted(paper[name], device="cuda")}

    table = folders("cifar10-symmetric")
    assert folders("runtime") < table
    assert folders("learning-curves") < table
    assert folders("orthogonality") < table
    assert len(folders("ablation") & table) == 3  # the full method, on three draws
    assert len(folders("alpha") & folders("ablation")) == 6  # alpha = 2 is the full one, 1 that without augmentation
    assert folders("correction") == folders("correction-clients")


def test_a_failed_run_stops_no_other_and_is_shown_as_failed(tmp_path, monkeypatch):
    entry = reproduce.entry("communication", "smoke")
    runs = reproduce.wanted(entry, device="cpu")
    method = registry.load_method("fedcova")

    def broken(self, state, uploads, server):
        if server.round:
            raise RuntimeError("no luck")
        return whole(self, state, uploads, server)

    whole = method.aggregate
    with monkeypatch.context() as patch:
        patch.setattr(method, "aggregate", broken)
        failures = reproduce.carry_out(list(reversed(runs)), data_root=NOWHERE, out=tmp_path, device="cpu")
    assert ["no luck" in text for text in failures.values()] == [True]
    lines = reproduce.compared(entry, runs, reproduce.present(runs, tmp_path))
    states = {(one.line, one.measure): (len(one.by_draw), one.failed, one.missing) for one in lines}
    assert states["fedavg", "upload of a client"] == (1, 0, 0)
    assert states["fedcova", "covariances of a client"] == (0, 1, 0)
    assert reproduce.carry_out(runs, data_root=NOWHERE, out=tmp_path, device="cpu") == {}
    assert reproduce.present(runs, tmp_path)[1].result.status == "failed"
    command = ("reproduce", "communication", "--scale", "smoke", "--device", "cpu", "--out", tmp_path)
    again = call(*command)
    assert again.exit_code == 1  # the result is of an earlier session, and still none
    assert f"failed: {runs[1].settings.folder(tmp_path)}: " in again.stderr
    (row,) = [
        line.split("\t")
        for line in again.stdout.splitlines()
        if "\tcovariances of a client" in line and "fedcova" in line
    ]
    assert row[3] == "failed"
    done(*command, "--retry")
    assert reproduce.present(runs, tmp_path)[1].result.status == "complete"


@pytest.mark.parametrize(("device", "cards"), [("auto", ["5", "7"]), ("cuda", ["5", "7"]), ("cuda:1", ["7"])])
def test_several_runs_at_once_are_on_the_cards_that_are_named(tmp_path, monkeypatch, device, cards):
    sweep = pytest.importorskip("flnoisebench.sweep")
    monkeypatch.setattr(sweep, "visible_cards", lambda: ["5", "7"])  # by CUDA_VISIBLE_DEVICES
    monkeypatch.setattr(
        reproduce.runtime, "pick_devices", lambda wish: [torch.device("cuda", int(wish.partition(":")[2] or 0))]
    )
    places = []

    def sweeping(runs, *, place, **rest):
        places.append(place)
        return SimpleNamespace(carry_out=lambda: [])

    monkeypatch.setattr(sweep, "Sweep", sweeping)
    reproduce._swept([], NOWHERE, tmp_path, device, 2, False)
    assert places[0].cards == [card for card in cards for _ in range(2)]


def test_each_run_that_failed_in_a_leaderboard_is_named_by_its_file():
    """They were named by the leaderboard, which showed the last of them alone."""
    kept = [leaderboard_entries.entry(draw=draw, status="failed") for draw in range(2)]
    found = failed_of([reproduce.Done("", "", i, None, one) for i, one in enumerate(kept)], Path("boards"))
    assert found == {str(one.path(Path("boards"))): "it broke" for one in kept}
    assert len(found) == 2


def test_an_entry_of_a_run_without_a_predictor_has_no_covariances_of_no_bytes():
    measure = reproduce.MEASURES["covariances of a client"]
    kept = leaderboard_entries.entry(method="fedcova")
    assert measure.of(reproduce.Done("", "", 0, None, kept), None) is None
    last = kept.last5.model_copy(update={"recall": [50.0] * 10})
    number = measure.of(reproduce.Done("", "", 0, None, kept.model_copy(update={"last5": last})), None)
    assert number == 10 * kept.settings.method_settings["d"] ** 2 * 4 / 1e6


def test_a_run_that_fails_and_leaves_no_result_is_said_and_no_success(tmp_path, monkeypatch):
    """As where its first state fails, or in a sweep all its workers die: nothing in its folder says so."""
    entry = reproduce.entry("communication", "smoke")
    (lost,) = [run for run in reproduce.wanted(entry, device="cpu") if run.line == "fedcova"]
    command = ("reproduce", "communication", "--scale", "smoke", "--device", "cpu", "--out")

    def no_luck(self, server):
        raise RuntimeError("no luck")

    monkeypatch.setattr(registry.load_method("fedcova"), "init", no_luck)
    result = call(*command, tmp_path)
    assert result.exit_code == 1
    assert f"failed: {lost.settings.folder(tmp_path)}: FedCova, round 0, exchange 0, init: " in result.stderr

    def swept(runs, *rest):
        return [
            SimpleNamespace(status="failed", failure=f"{run.method}: no luck", folder=Path("/absolute")) for run in runs
        ]

    monkeypatch.setattr(reproduce, "_swept", swept)
    monkeypatch.chdir(tmp_path)
    result = call(*command, "out", "--workers", 2)
    assert result.exit_code == 1
    assert f"failed: {lost.settings.folder(Path('out'))}: fedcova: no luck" in result.stderr


def test_a_result_is_read_before_its_run_and_after_it_and_by_a_dry_run_once(tmp_path, monkeypatch):
    runs = finished(reproduce.entry("communication", "smoke"), tmp_path)
    read, load = [], records.load_result

    def counted(folder):
        read.append(folder)
        return load(folder)

    monkeypatch.setattr(records, "load_result", counted)
    folders = Counter(run.settings.folder(tmp_path) for run in runs)
    command = ("reproduce", "communication", "--scale", "smoke", "--device", "cpu", "--out", tmp_path)
    done(*command)
    assert Counter(read) == folders + folders
    assert "is 'yesterday', which is no commit" in call(*command, FLNOISEBENCH_COMMIT="yesterday").stderr
    read.clear()
    done(*command, "--dry-run", "--figure", tmp_path / "own.svg")
    assert Counter(read) == folders


def test_what_a_leaderboard_keeps_is_shown_and_not_run_again(tmp_path, monkeypatch):
    """Rows outlive the folders of their runs: from a clone alone a table shows the same numbers."""
    chosen = [reproduce.entry(name, "smoke") for name in ("correction", "communication")]
    runs, boards, nothing = tmp_path / "runs", tmp_path / "boards", tmp_path / "nothing"
    plans = [finished(entry, runs) for entry in chosen]
    done("leaderboard", "build", runs, "--out", boards, FLNOISEBENCH_COMMIT="c" * 40)
    kept = board.kept(boards)
    monkeypatch.setattr(runtime, "prepare", None)  # nothing is to be prepared
    for entry, plan in zip(chosen, plans, strict=True):
        assert reproduce.carry_out(plan, data_root=NOWHERE, out=nothing, device="cpu", kept=kept) == {}
        over, own = reproduce.present(plan, nothing, kept), reproduce.present(plan, runs, kept)
        assert all(run.folder is None for run in over)
        assert all(run.folder is not None for run in own)  # a run's own folder first
        lines = reproduce.compared(entry, plan, over)
        assert lines == reproduce.compared(entry, plan, own)
        assert any(line.by_draw for line in lines)
    assert not nothing.exists()

    said = ("correction", "--scale", "smoke", "--device", "cpu", "--out", nothing, "--leaderboard", boards)
    shown = done("reproduce", *said, "--dry-run")
    assert "figure\t" not in shown
    drawn = tmp_path / "own.svg"
    assert f"figure\t{drawn}" in done("reproduce", *said, "--dry-run", "--figure", drawn)
    assert drawn.is_file()
    assert "2 runs, 2 of them over, 0 to run" in shown
    assert "2 of the runs are what the leaderboard keeps of them" in shown
    content = json.loads(done("reproduce", *said, "--json"))["entries"][0]
    assert [line["mean"] for line in content["lines"]] == [
        line.mean for line in reproduce.compared(chosen[0], plans[0], reproduce.present(plans[0], runs))
    ]
    assert Path(content["figure"]).read_text().count("<path") > 10
    parts = json.loads(done("reproduce", "claims", *said[1:], "--json"))["claims"]
    assert any(part["mean"] is not None for claim in parts for part in claim["parts"] if part["draws"])
    assert "holds no leaderboard" in refused("reproduce", "correction", "--leaderboard", nothing, "--dry-run")


def test_what_only_a_runs_own_folder_has_is_missing_and_not_wrong(tmp_path):
    entry = reproduce.entry("orthogonality", "smoke")
    plan = finished(entry, tmp_path / "runs")
    done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "boards", FLNOISEBENCH_COMMIT="c" * 40)
    kept = board.kept(tmp_path / "boards")
    whole, part = (
        reproduce.compared(entry, plan, reproduce.present(plan, tmp_path / "runs")),
        reproduce.compared(entry, plan, reproduce.present(plan, tmp_path, kept)),
    )
    assert {line.measure for line in whole} == {"phi, first round", "phi, last five", "accuracy"}
    assert part == [line for line in whole if line.measure == "accuracy"]


def test_the_committed_rows_stand_in_the_papers_table():
    entry = reproduce.entry("cifar10-symmetric", "short")
    runs = reproduce.wanted(entry, device="cuda")
    kept = board.kept(Path(__file__).parents[1] / "leaderboards")
    (line,) = (
        one
        for one in reproduce.compared(entry, runs, reproduce.present(runs, NOWHERE, kept))
        if (one.line, one.level) == ("fedavg", "rho=0.6 tau=0.7")
    )
    assert (sorted(line.by_draw), round(line.mean, 2), line.published) == ([0, 1, 2], 63.27, 52.87)


def test_the_difference_has_the_interval_of_our_mean_over_draws():
    line = Line("", "fedcova", "accuracy", "%", {0: 80.0, 1: 82.0, 2: 84.0}, 81.0)
    half = 4.302653 * 2 / 3**0.5  # Student's t at two degrees of freedom, a deviation of 2
    assert (line.mean, line.std) == (82.0, 2.0)
    assert line.beside() == pytest.approx({"difference": 1.0, "low": 1 - half, "high": 1 + half}, rel=1e-5)
    assert cells_of(line)[3:] == ("82.00", "2.00", "3", "81.00", "+1.00", "-3.97 to +5.97")  # half is 4.97
    alone = Line("", "fedcova", "accuracy", "%", {0: 80.0}, 81.0)
    assert alone.beside() == {"difference": -1.0, "low": None, "high": None}
    assert alone.std is None
    assert cells_of(alone)[3:] == ("80.00", "", "1", "81.00", "-1.00", "")


@pytest.mark.parametrize(
    ("failed", "missing", "said"), [(1, 0, "failed"), (1, 2, "failed"), (0, 3, "not run"), (0, 0, "-")]
)
def test_a_line_without_a_number_says_why(failed, missing, said):
    line = Line("", "fedcova", "accuracy", "%", {}, 81.0, failed=failed, missing=missing)
    assert cells_of(line)[3:] == (said, "", "0", "81.00", "", "")


def record(round, accuracy, noise=None, phi=None):
    return SimpleNamespace(
        round=round, accuracy=accuracy, label_noise=noise, diagnostics={} if phi is None else {"phi": phi}
    )


def made(rounds, noise_before=None, **environment):
    result = SimpleNamespace(label_noise_before=noise_before, environment=environment, seconds={"round": 3.2})
    return SimpleNamespace(rounds=rounds, result=result)


def test_measures_by_hand():
    noise = [30.0, 30.0, 20.0, 20.0, 21.5, 15.0]
    run = made([record(i, 50.0, value) for i, value in enumerate(noise)], 30.0)
    assert reproduce.worst_correction(run) == 1.5  # -10, +1.5, -6.5
    assert reproduce.worst_correction(made([record(0, 50.0, 30.0)], 30.0)) is None
    assert reproduce.roughness(made([record(i, value) for i, value in enumerate((0, 90, 50, 52, 49, 50))])) == 2.0
    rising = [record(i, a, phi=p) for i, (a, p) in enumerate(((10, 0.5), (20, 0.3), (30, 0.2)))]
    assert reproduce.phi_against_accuracy(made(rising)) == -1.0
    flat = [record(i, a, phi=p) for i, (a, p) in enumerate(((10, 0.5), (30, 0.3), (20, 0.2)))]
    assert (
        reproduce.phi_against_accuracy(made(flat)) == -0.5
    )  # phi falls all the way, accuracy does not rise all the way
    assert reproduce.phi_against_accuracy(made([record(i, 1.0) for i in range(5)])) is None
    here, there = made([], device="cpu", lanes=1), made([], device="cpu", lanes=4)
    assert reproduce.time_ratio(here, here) == 1.0
    assert reproduce.time_ratio(here, there) is None  # other hardware
    assert reproduce.time_ratio_alone(here, here) is None  # nobody knows
    alone, beside = (made([], device="cpu", lanes=1, sharing=said) for said in ("alone", "beside others"))
    assert reproduce.time_ratio_alone(alone, alone) == reproduce.time_ratio(beside, beside) == 1.0
    assert reproduce.time_ratio_alone(beside, beside) is reproduce.time_ratio_alone(alone, beside) is None
    moved = made([], device="cpu", lanes=1, earlier=[{"device": "cpu", "lanes": 4}])
    assert reproduce.time_ratio(moved, here) is None  # begun on other hardware
    assert reproduce.time_ratio(here, None) is None


def test_costs_and_phi_by_hand():
    def number(measure, run, reference=None):
        return reproduce.MEASURES[measure].of(run, reference)

    said = {"clients": 10, "changes": ["protocol.participation=0.5"], "seconds": 30.0}  # two rounds of five clients
    fedavg, ours = (
        reproduce.Done("", "", 0, None, leaderboard_entries.entry(bytes_up=up, method=method, **said))
        for method, up in (("fedavg", 2_000_000), ("fedcova", 3_000_000))
    )
    assert number("upload of a client", fedavg) == 0.2
    assert number("upload of a client", ours) == pytest.approx(0.3)
    assert number("upload over FedAvg's", ours, fedavg) == pytest.approx(50)
    assert number("upload over FedAvg's", ours) is None
    assert number("minutes", ours) == 1
    assert (number("noise before", ours), number("noise after", ours)) == (30, 20)
    run = made([record(i, 50.0, phi=phi) for i, phi in enumerate((9.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0))])
    assert (number("phi, first round", run), number("phi, last five", run)) == (9, 4)


# ------------------------------------------------------------------------------------------------ the claims


def judged(monkeypatch, cells, **claim):
    """The verdict on numbers made up here: cells as {(line, level): {draw: number}}."""
    entry = SimpleNamespace(
        name="table",
        levels=dict.fromkeys(level for _, level in cells),
        lines=dict.fromkeys(line for line, _ in cells),
    )
    monkeypatch.setattr(reproduce, "wanted", lambda *_, **__: [])
    monkeypatch.setattr(reproduce, "present", lambda *_: [])
    monkeypatch.setattr(reproduce, "measured", lambda *_: {key: values for key, values in cells.items() if values})
    said = {"name": "c", "text": "", "entries": ["table"], "line": "ours", "measure": "accuracy", **claim}
    return claims._judged(said, {"table": entry}, Path(), "cpu", None)


def draws(*values):
    return dict(enumerate(values))


def test_a_lead_holds_where_every_interval_is_above_0(monkeypatch):
    ours, close, far = draws(80.0, 82.0, 84.0), draws(78.9, 81.0, 82.9), draws(60.0, 61.0, 65.0)
    verdict = judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): close, ("y", "a"): far}, judge="leads")
    # leads over x: 1.1, 1.0, 1.1; t(.975, 2) = 4.302653, a deviation of .057735
    half = 4.302653 * 0.0577350 / 3**0.5
    assert verdict.state == "holds"
    assert verdict.closest.what == "table, a: over x"
    assert (verdict.closest.low, verdict.closest.high) == pytest.approx((3.2 / 3 - half, 3.2 / 3 + half), rel=1e-5)
    assert closest_of(verdict) == ("table, a: over x", "3", "+1.07 %", "+0.923 to +1.21")  # half is .143


def test_a_lead_fails_where_a_rival_is_surely_ahead_at_the_corrected_level(monkeypatch):
    ours = draws(80.0, 82.0, 84.0)
    ahead = draws(81.0, 83.1, 84.9)
    verdict = judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): ahead, ("y", "a"): {}}, judge="leads")
    assert (verdict.state, verdict.why) == ("fails", "table, a: over x")  # though y was not run
    # alone this lead's interval is below 0 (mean -1, deviation .346, t 4.303: half .86), at a fortieth it is not (t 15)
    slightly = draws(80.6, 83.2, 85.2)
    assert judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): slightly}, judge="leads").state == "fails"
    many = {("ours", "a"): ours, ("x", "a"): slightly} | {(f"y{i}", "a"): draws(1.0, 2.0, 3.0) for i in range(19)}
    assert judged(monkeypatch, many, judge="leads").state == "undetermined"


def test_a_lead_is_undetermined_with_one_draw_with_a_missing_run_and_with_an_interval_over_0(monkeypatch):
    one = judged(monkeypatch, {("ours", "a"): draws(80.0), ("x", "a"): draws(10.0)}, judge="leads")
    assert (one.state, one.why) == ("undetermined", "1 of 1 parts have one draw or no spread, and so no interval")
    ours = draws(80.0, 82.0, 84.0)
    some = judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): draws(1.0, 2.0, 4.0), ("y", "a"): {}}, judge="leads")
    assert (some.state, some.why, some.missing) == ("undetermined", "1 of 2 parts have no run", 1)
    wide = judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): draws(70.0, 90.0, 60.0)}, judge="leads")
    assert wide.state == "undetermined"
    assert "interval that holds 0" in wide.why


def test_a_lead_in_roughness_is_less_of_it(monkeypatch):
    cells = {("ours", "a"): draws(1.0, 1.1, 1.2), ("x", "a"): draws(3.0, 3.2, 3.1)}
    assert judged(monkeypatch, cells, judge="leads", measure="roughness").state == "holds"


def test_flat_asks_the_gap_between_levels_to_stay_within_the_margin(monkeypatch):
    def verdict(hard):
        cells = {("ours", "easy"): draws(88.0, 88.2, 88.1), ("ours", "hard"): hard}
        return judged(monkeypatch, cells, judge="flat", within=1.0)

    assert verdict(draws(87.6, 87.9, 87.7)).state == "holds"
    assert verdict(draws(80.0, 80.3, 80.2)).state == "fails"
    assert verdict(draws(86.9, 87.3, 87.1)).state == "undetermined"
    assert verdict({}).why == "2 of 2 parts have no run"


def test_levels_that_chance_alone_sets_apart_are_not_called_uneven(monkeypatch):
    # three levels of one mean; in each draw the best is 1.9 to 2.1 points over the worst, each time another one
    cells = {
        ("ours", "a"): draws(88.0, 87.0, 86.0), ("ours", "b"): draws(86.9, 86.1, 88.0),
        ("ours", "c"): draws(86.1, 88.0, 87.0),
    }  # fmt: skip
    verdict = judged(monkeypatch, cells, judge="flat", within=1.0)
    assert (verdict.state, len(verdict.parts)) == ("undetermined", 6)


def test_a_claim_does_not_hold_by_numbers_without_spread(monkeypatch):
    ours, rival = draws(80.0, 82.0), draws(79.9, 81.9)
    verdict = judged(monkeypatch, {("ours", "a"): ours, ("x", "a"): rival}, judge="leads")
    assert (verdict.state, verdict.why) == (
        "undetermined",
        "1 of 1 parts have one draw or no spread, and so no interval",
    )


def test_below_asks_every_level_to_stay_below_the_limit(monkeypatch):
    def verdict(*values):
        return judged(monkeypatch, {("ours", "a"): draws(*values)}, judge="below", measure="time ratio", limit=1.65)

    assert verdict(1.50, 1.52, 1.49).state == "holds"
    assert verdict(1.90, 1.92, 1.91).state == "fails"
    assert verdict(1.2, 1.9, 1.6).state == "undetermined"


def test_the_toy_boundary_is_no_circle():
    (verdict,) = [one for one in claims.verdicts("smoke", NOWHERE, device="cpu") if one.name == "toy-boundary"]
    assert verdict.state == "fails"
    # variances 8 and 4.2 against 4.2 and 7: (1/8 - 1/4.2) / (1/4.2 - 1/7)
    assert verdict.closest.mean == pytest.approx((1 / 8 - 1 / 4.2) / (1 / 4.2 - 1 / 7))


def test_without_results_every_claim_of_runs_is_undetermined(tmp_path):
    found = claims.verdicts("paper", tmp_path, device="cpu")
    assert {one.state for one in found if one.name != "toy-boundary"} == {"undetermined"}
    assert len(found) == 11


# ------------------------------------------------------------------------------------------- the command


def test_reproduce_prints_ours_beside_the_published_and_draws_the_figure(tmp_path):
    out = tmp_path / "runs"
    text = done("reproduce", "correction", "--scale", "smoke", "--draws", 2, "--out", out, "--device", "cpu")
    table = [line.split("\t") for line in text.splitlines()]
    heading = next(line for line in table if line[0] == "level")
    wanted = ["rho=0.6 tau=0.7", "fedcova", "noise before (%)"]
    (row,) = [dict(zip(heading, line, strict=True)) for line in table if line[:3] == wanted]
    runs = reproduce.wanted(reproduce.entry("correction", "smoke"), device="cpu", draws=2)
    values = [run.result.label_noise_before for run in reproduce.present(runs, out) if run.level == "rho=0.6 tau=0.7"]
    assert len(values) == 2
    assert row["ours"] == f"{sum(values) / 2:.2f}"
    assert (row["n"], row["published"]) == ("2", "34.42")
    assert row["difference"] == f"{sum(values) / 2 - 34.42:+.2f}"
    assert " to " in row["95 % interval"]
    assert ["published", reproduce.entry("correction", "smoke").source] in table
    assert any(line[0] == "note" and "runs on digits, and the paper on cifar10" in line[1] for line in table)
    assert any(line[0] == "note" and "the published number counts as exact in it" in line[1] for line in table)
    assert (out / "figures" / "smoke" / "correction.svg").read_text().startswith("<?xml")

    # what is over is shown where no run can be made too (digits have one precision, also on a GPU)
    shown = done(
        "reproduce", "correction", "--scale", "smoke", "--draws", 2, "--out", out, "--device", "cuda", "--dry-run"
    )
    assert "correction\t4 runs, 4 of them over, 0 to run" in shown
    assert ["\t".join(row.values())] == [line for line in shown.splitlines() if line.split("\t")[:3] == wanted]

    for dry in ((), ("--dry-run",)):
        words = ("reproduce", "correction", "--scale", "smoke", "--draws", 2, "--out", out, "--json", *dry)
        assert json.loads(done(*words))["entries"][0]["lines"][0]["published"] == 27.51
    verdicts = json.loads(done("reproduce", "claims", "--scale", "smoke", "--draws", 2, "--out", out, "--json"))
    falls = next(one for one in verdicts["claims"] if one["name"] == "noise-falls")
    worst = {
        run.draw: reproduce.worst_correction(run)
        for run in reproduce.present(runs, out)
        if run.level == "rho=0.4 tau=0.7"
    }
    assert falls["parts"][0]["draws"] == 2
    assert falls["parts"][0]["mean"] == pytest.approx(-sum(worst.values()) / 2)
    said = done(
        "reproduce", "claims", "--scale", "smoke", "--out", out, "--device", "cuda"
    )  # of a GPU that is not here
    heading, *judged = (line.split("\t") for line in said.splitlines())
    (toy,) = [dict(zip(heading, line, strict=True)) for line in judged if line[0].startswith("toy-boundary: ")]
    assert (toy["verdict"], toy["draws"]) == ("fails", "0")


def test_a_dry_run_counts_and_runs_nothing(tmp_path):
    text = rows(done("reproduce", "all", "--dry-run", "--out", tmp_path / "runs", "--device", "cpu"))
    assert text["cifar10-symmetric"] == "162 runs, 0 of them over, 162 to run"
    assert text["runtime"] == "27 runs, 0 of them over, 0 to run"  # the table's
    said = done("reproduce", "all", "--dry-run", "--out", tmp_path / "runs", "--device", "cpu", "--json")
    first, *_ = json.loads(said)["entries"]
    assert (first["name"], first["runs"], first["over"], first["to_run"]) == ("cifar10-symmetric", 162, 0, 162)
    assert not (tmp_path / "runs").exists()
    known = {one["name"]: one["runs"] for one in json.loads(done("reproduce", "list", "--json"))["entries"]}
    assert (known["cifar10-symmetric"], known["noise"]) == (162, 0)


def test_missing_data_are_named_with_what_brings_them(tmp_path):
    said = refused("reproduce", "partition", "--data-root", tmp_path, "--out", tmp_path / "runs", "--device", "cpu")
    assert str(tmp_path) in said
    assert "data fetch cifar10" in said


def test_without_matplotlib_the_figure_is_lost_and_not_the_numbers_unless_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ("reproduce", "toy-densities", "--scale", "smoke", "--device", "cpu", "--out", tmp_path)
    result = call(*command)
    assert (result.exit_code, result.stdout.startswith("toy-densities\t")) == (0, True)
    assert "no figure of toy-densities: figures need matplotlib" in result.stderr
    asked = call(*command, "--figure", tmp_path / "toy.svg")
    assert asked.exit_code == 2
    assert "pip install 'flnoisebench[plots]'" in asked.stderr


def test_of_all_entries_one_whose_data_are_missing_stops_no_other_and_is_no_success(tmp_path, monkeypatch):
    whole = reproduce.entries()
    monkeypatch.setattr(reproduce, "entries", lambda scale: {n: whole[n] for n in ("partition", "toy-densities")})
    monkeypatch.setattr(reproduce, "draw", lambda *_, **__: False)
    result = call("reproduce", "all", "--data-root", tmp_path, "--out", tmp_path / "runs", "--device", "cpu")
    assert result.exit_code == 1
    assert "not run: partition: " in result.stderr
    assert result.stdout.startswith("toy-densities\t")


def test_entries_without_runs_are_drawn_at_once(tmp_path):
    for name in ("partition", "noise", "toy-densities", "toy-projections"):
        entry = reproduce.entry(name, "smoke")
        path = tmp_path / f"{name}.svg"
        assert reproduce.wanted(entry, device="cpu") == []
        assert reproduce.draw(entry, [], path, data_root=NOWHERE)
        assert path.read_text().startswith("<?xml")
    lines = reproduce.compared(reproduce.entry("noise", "smoke"), [], [], data_root=NOWHERE)
    rates = {one.level: one.mean for one in lines if one.measure == "noise before"}
    assert len(rates) == 6
    assert rates["rho=0.8 tau=0.7"] > rates["rho=0.4 tau=0.5"]


@pytest.mark.slow
def test_all_smoke_scales_together_finish_within_three_minutes(tmp_path):
    content = json.loads(done("reproduce", "all", "--scale", "smoke", "--out", tmp_path, "--device", "cpu", "--json"))
    seconds = 0.0
    for path in tmp_path.rglob("result.json"):
        result = records.load_result(path.parent)
        assert result.status == "complete"
        seconds += result.seconds["round"]
    assert seconds < 180
    drawn = {one["name"] for one in content["entries"] if one["figure"]}
    assert drawn == {one.name for one in reproduce.entries("smoke").values() if one.show != "accuracy"}
    for one in content["entries"]:
        assert one["lines"], one["name"]
        assert all(line["mean"] is not None for line in one["lines"]), one["name"]
