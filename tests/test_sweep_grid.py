"""Grid files: what they span, what they refuse, what a plan of one says; and the runs of a folder, counted fast."""

import inspect
import json
import sys
import time
import timeit
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call, done, only_run, refused, rows, snapshot

import flnoisebench
from flnoisebench import grid, records, registry, runs
from flnoisebench.cli.run import run
from flnoisebench.cli.sweep import missing_in, place_of
from flnoisebench.leaderboard import board
from flnoisebench.settings import OPTIONS, from_options, resolve

EXAMPLES = Path(__file__).parents[1] / "examples"
LEADERBOARDS = Path(__file__).parents[1] / "leaderboards"
HERE_ONLY = {"device", "lanes", "executor", "data_root", "out", "retry", "as_json", "config", "log_to"}


def spans(text: str) -> list[dict]:
    return grid.expand(tomllib.loads(text))


# ------------------------------------------------------------------------------------------------ expansion


def test_a_list_spans_the_grid_and_one_value_is_the_same_everywhere():
    assert spans('rounds = 3\nmethod = ["fedavg", "fedcova"]\nseed = [0, 1]') == [
        {"rounds": 3, "method": "fedavg", "seed": 0},
        {"rounds": 3, "method": "fedavg", "seed": 1},
        {"rounds": 3, "method": "fedcova", "seed": 0},
        {"rounds": 3, "method": "fedcova", "seed": 1},
    ]


def test_settings_span_as_tables_and_as_lists_of_what_belongs_together():
    assert spans("[set]\nprotocol.optimiser.lr = [0.03, 0.1]\nalpha = 2") == [
        {"set": ["protocol.optimiser.lr=0.03", "alpha=2"]},
        {"set": ["protocol.optimiser.lr=0.1", "alpha=2"]},
    ]
    assert spans('set = [["alpha=2", "beta=1"], "alpha=7", {alpha = 9, beta = "none"}]') == [
        {"set": ["alpha=2", "beta=1"]},
        {"set": ["alpha=7"]},
        {"set": ["alpha=9", "beta=none"]},
    ]
    assert spans("noise-set.include_true = [true, false]") == [
        {"noise_set": ["include_true=true"]},
        {"noise_set": ["include_true=false"]},
    ]
    assert spans("set.milestones = [[1, 2]]") == [{"set": ["milestones=[1, 2]"]}]  # a list that is one value


def test_exclusions_leave_out_what_agrees_with_all_of_them():
    text = 'method = ["a", "b"]\nseed = [0, 1, 2]\nset.x = [1, 2]\n[[exclude]]\nmethod = "b"\nseed = [1, 2]\n'
    assert len(spans(text)) == 2 * 3 * 2 - 2 * 2
    fewer = spans(text + "[[exclude]]\nset.x = 2\nmethod = 'a'")
    assert len(fewer) == 8 - 3
    assert {point["set"][0] for point in fewer if point["method"] == "a"} == {"x=1"}


def test_inclusions_are_small_grids_on_top_of_the_single_values():
    found = spans('rounds = 3\nmethod = ["a", "b"]\n[[include]]\nmethod = "c"\nseed = [5, 6]\nrounds = 9')
    assert found[2:] == [{"rounds": 9, "method": "c", "seed": 5}, {"rounds": 9, "method": "c", "seed": 6}]
    assert spans('[[include]]\nmethod = "c"') == [{"method": "c"}]
    shared = 'rounds = 3\n[[include]]\nmethod = "c"\n[[include]]\nmethod = "d"'
    assert spans(shared) == [{"rounds": 3, "method": "c"}, {"rounds": 3, "method": "d"}]
    assert len(spans('method = "a"\n' + shared)) == 3
    assert len(spans("seed = [0, 1]\n" + shared)) == 4


def test_what_an_inclusion_says_wins_however_the_single_values_said_it():
    def include(shared: str, own: str) -> dict:
        return spans(f'method = ["a", "b"]\n{shared}\n[[include]]\n{own}')[-1]

    assert include("rho = 0.4\ntau = 0.5", "noise_set.rho = 0.2") == {"tau": 0.5, "noise_set": ["rho=0.2"]}
    assert include("set = [['x=1', 'y=2']]", "set.x = 3") == {"set": ["x=3"]}  # a list spans, and is not shared
    assert include("set.x = 1\nset.y = 2", "set = 'x=3'") == {"set": ["y=2", "x=3"]}
    assert include("rounds = 3", "set.protocol.rounds = 9") == {"set": ["protocol.rounds=9"]}
    assert include("partition_set.law = 'iid'", "partition = 'shards'") == {"partition_set": [], "partition": "shards"}


def test_what_comes_to_the_same_run_comes_once():
    same = grid.expand({"method": "fedavg", "precision": ["fp32"], "seed": [0, 0], "include": [{"method": "fedavg"}]})
    assert len(same) == 3
    assert len(grid.runs_of(same, device="cpu")) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('methd = "fedavg"', "unknown option 'methd'. Did you mean method"),
        ('method = ["fedavg", "fedcovo"]', "method=fedcovo: unknown method 'fedcovo'. Did you mean fedcova"),
        ("seed = []", "seed = [] spans nothing"),
        ("seed = [0, 1.5]", "seed = 1.5: a whole number is wanted"),
        ('rho = "much"', "rho = 'much': a number is wanted"),
        ("draw = true", "draw = True: a whole number is wanted"),
        ("seed = -1", "seed = -1: Input should be greater than or equal to 0"),
        ('out = "elsewhere"', "it is said on the command line of the sweep"),
        ('data-root = "elsewhere"', "it is said on the command line of the sweep"),
        ("method.name = 3", "method is one value or a list of values, not a table"),
        ("set = [3]", "set = 3: write"),
        ('[exclude]\nmethod = "fedavg"', "exclude is written as a table in two pairs of brackets: [[exclude]]"),
        ('seed = [0, 1]\n[[exclude]]\nmethod = "fedavg"', "unknown key of this grid 'method'"),
        ("seed = [0, 1]\n[[exclude]]\nseed = 2", "[[exclude]] 1 leaves out nothing: no combination agrees with seed=2"),
        ("seed = [0]\n[[exclude]]\nseed = 0", "this grid names no run"),
        ("", "this grid names no run"),
        ("seed = [0\nmethod = 1", "is not TOML"),
        (
            "rho = [0.4, 0.5]\nnoise_set.rho = 0.5",
            "rho=0.4 noise_set: rho=0.5: --rho 0.4 and --noise-set rho=0.5 contra",
        ),
        ('method = "fedavg"\nset.alpa = 1', "set: alpa=1: settings of fedavg"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_whole_before_anything_starts(tmp_path, text, found):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    message = refused("sweep", path, "--out", tmp_path / "out")
    assert found in message
    assert str(path) in message
    assert not (tmp_path / "out").exists()


def test_every_wrong_combination_is_named_up_to_ten():
    with pytest.raises(ValueError, match="12 combinations cannot be run") as caught:
        grid.runs_of([{"method": "fedavg", "seed": -seed} for seed in range(1, 13)], device="cpu")
    assert "seed=-10:" in str(caught.value)
    assert "seed=-11:" not in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_a_mistake_that_all_combinations_have_is_said_once(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('method = ["fedavg", "fedcova"]\ndraw = [0, 1, 2]\nset.protocol.optimiser.l = 0.1')
    message = refused("sweep", path, "--out", tmp_path / "out")
    assert "6 combinations cannot be run" in message
    assert "draw=0 set: protocol.optimiser.l=0.1 and 5 more: protocol digits: unknown setting" in message
    assert message.count("unknown setting") == 1


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert "cannot read" in refused("sweep", tmp_path / "nothing.toml")


# ------------------------------------------------------------------------------------ options and settings


def test_a_grid_may_say_every_option_of_run_that_decides_its_numbers_and_no_other():
    named = {name.rstrip("_") for name in inspect.signature(run).parameters} - {"context"}
    assert set(OPTIONS) == named - HERE_ONLY
    assert set(grid.ELSEWHERE) == {name.removeprefix("as_") for name in HERE_ONLY}


def test_options_become_the_settings_that_they_name():
    options = {"method": "fedavg", "rho": 0.4, "noise_set": ["include_true=false"], "partition_set": ["p=0.3"],
               "alpha": 2.0, "set": ["protocol.batch=8"], "seed": 3, "tau": None}  # fmt: skip
    assert from_options(options, device="cpu") == resolve(
        method="fedavg",
        noise_changes={"rho": 0.4, "include_true": False},
        partition_changes={"alpha": 2.0, "p": 0.3},
        changes=["protocol.batch=8"],
        seed=3,
        precision="fp32",
    )
    assert from_options({"protocol": "cifar10"}, device="cuda").protocol.precision == "bf16"
    assert from_options({"protocol": "cifar10"}, device="cpu").protocol.precision == "fp32"
    assert from_options({"precision": "tf32"}, device="cpu").protocol.precision == "tf32"


# --------------------------------------------------------------------------------------- plans and examples


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('rounds = 2\nclients = 5\nmethod = ["fedavg", "fedcova"]\nseed = [0, 1]\n')
    return path


def test_a_dry_run_says_what_is_done_and_what_the_rest_costs_and_writes_nothing(tmp_path, tiny):
    out = tmp_path / "runs"
    plan = json.loads(done("sweep", tiny, "--out", out, "--dry-run", "--json", "--device", "cpu"))
    assert [row["status"] for row in plan["runs"]] == ["new"] * 4
    assert [row["seconds"] for row in plan["runs"]] == [None] * 4
    assert not out.exists()

    done("run", "--method", "fedavg", "--rounds", "2", "--clients", "5", "--out", out, "--device", "cpu")
    folder = only_run(out)
    result = json.loads((folder / "result.json").read_text())
    result["seconds"]["round"] = 3.0  # for two rounds
    (folder / "result.json").write_text(json.dumps(result))
    before = snapshot(out)
    plan = json.loads(done("sweep", tiny, "--out", out, "--dry-run", "--json", "--device", "cpu"))
    assert [(row["status"], row["seconds"]) for row in plan["runs"]] == [
        ("complete", 0.0), ("new", 3.0), ("new", None), ("new", None),
    ]  # fmt: skip
    assert plan["total"] == {"runs": 4, "seconds": 3.0, "unknown": 2}
    said = done("sweep", tiny, "--out", out, "--dry-run", "--device", "cpu").splitlines()
    assert said[0].startswith("complete, round 2 of 2\t-\t")
    assert said[1].startswith("new\t3.0 s\t")
    assert said[2].startswith("new\tunknown\t")
    assert "3.0 s of one run at a time, and 2 runs of unknown cost" in said[-1]
    assert snapshot(out) == before

    failed = {**result, "status": "failed", "failure": "no luck", "rounds": 1, "seconds": {"round": 3.0}}
    (folder / "result.json").write_text(json.dumps(failed))
    (folder / "records.jsonl").write_text((folder / "records.jsonl").read_text().splitlines(True)[0])
    command = ("sweep", tiny, "--out", out, "--dry-run", "--json", "--device", "cpu")
    other = folder.with_name("draw0-seed1")
    other.mkdir()
    (other / "failure.txt").write_text("it could not begin, and so may the next time\n")
    for words, seconds in ((command, 0.0), ((*command, "--retry"), 3.0)):  # the second of its rounds
        row, unbegun, *_ = json.loads(done(*words))["runs"]
        assert (unbegun["status"], unbegun["seconds"]) == ("failed", 6.0)  # it is tried again, unasked
        assert (row["status"], row["rounds"], row["seconds"]) == ("failed", 1, seconds)
    (folder / "result.json").unlink()
    spent = records.load_records(folder)[0].seconds["round"]
    row, *_ = json.loads(done(*command))["runs"]
    assert (row["status"], row["rounds"], row["seconds"]) == ("unfinished", 1, pytest.approx(spent))


def test_a_dry_run_does_not_count_a_damaged_run_as_one_to_be_run(tmp_path, tiny):
    out = tmp_path / "runs"
    done("run", "--method", "fedavg", "--rounds", "2", "--clients", "5", "--out", out, "--device", "cpu")
    folder = only_run(out)
    (folder / "result.json").write_text("{")
    said = call("sweep", tiny, "--out", out, "--dry-run", "--json", "--device", "cpu")
    (row, *others) = json.loads(said.stdout)["runs"]
    assert (row["status"], row["seconds"]) == ("damaged", 0.0)
    assert f"move {folder} away" in row["problem"]
    assert [other["problem"] for other in others] == [None] * 3
    assert said.stderr.strip() == f"not run as it is: {row['problem']}"
    said = done("sweep", tiny, "--out", out, "--dry-run", "--device", "cpu").splitlines()
    assert said[0].startswith("damaged\t-\t")
    assert said[-2].endswith("4: 1 damaged, 3 new")


def test_what_a_leaderboard_has_is_left_out(tmp_path, tiny, monkeypatch):
    """On a machine that has the leaderboard and not the runs' folders, they are not run again."""
    run = ("run", "--rounds", "2", "--clients", "5", "--device", "cpu", "--out", tmp_path / "runs")
    for seed in ("0", "1"):
        done(*run, "--method", "fedavg", "--seed", seed, FLNOISEBENCH_COMMIT="c" * 40)
    done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "boards")
    command = ("sweep", tiny, "--out", tmp_path / "new", "--device", "cpu", "--dry-run", "--json")
    plan = json.loads(done(*command, "--leaderboard", tmp_path / "boards"))
    assert [row["folder"].split("/")[-3] for row in plan["runs"]] == ["fedcova", "fedcova"]
    assert plan["left_out"] == 2
    plan = json.loads(done(*command))
    assert (len(plan["runs"]), plan["left_out"]) == (4, 0)
    tiny.write_text(tiny.read_text().replace("[0, 1]", "[0, 1, 2]"))
    plan = json.loads(done(*command, "--leaderboard", tmp_path / "boards"))
    known = {row["folder"].split("/")[-3]: row["seconds"] for row in plan["runs"]}
    assert known["fedavg"] > 0  # by what it took elsewhere
    assert known["fedcova"] is None
    done(*run[:-1], tmp_path / "new", "--method", "fedavg", "--seed", "3")
    here = runs.below(tmp_path / "new")[0].folder / "result.json"
    here.write_text(json.dumps({**json.loads(here.read_text()), "seconds": {"round": 30.0}}))
    plan = json.loads(done(*command, "--leaderboard", tmp_path / "boards"))
    assert next(row["seconds"] for row in plan["runs"] if "/fedavg/" in row["folder"]) == 30.0  # what ran here first
    assert "by the leaderboard's" in done(*command[:-1], "--leaderboard", tmp_path / "boards")
    assert "by the leaderboard's" not in done(*command[:-1])
    tiny.write_text(tiny.read_text().replace("[0, 1, 2]", "[0, 1]"))
    assert "holds no leaderboard" in refused(*command, "--leaderboard", tmp_path / "runs")

    wanted = grid.load(tiny, device="cpu")
    there = {one.folder(Path()): SimpleNamespace(status="failed") for one in wanted[:1]}
    monkeypatch.setattr(board, "kept", lambda leaderboards: there)
    assert missing_in(tmp_path, wanted, retry=False)[0] == wanted[1:]  # as a failed run in a folder stays failed
    assert missing_in(tmp_path, wanted, retry=True)[0] == wanted


def test_a_sweep_says_how_many_runs_a_leaderboard_left_out(tmp_path, tiny, monkeypatch):
    pytest.importorskip("distributed")
    there = {one.folder(Path()): SimpleNamespace(status="complete") for one in grid.load(tiny, device="cpu")}
    monkeypatch.setattr(board, "kept", lambda leaderboards: there)
    result = call("sweep", tiny, "--device", "cpu", "--out", tmp_path / "runs", "--leaderboard", tmp_path, "--json")
    assert json.loads(result.stdout) == {"runs": [], "left_out": 4, "complete": 0, "failed": 0}
    assert "4 of 4 runs are in" in result.stderr


def test_the_grid_of_cifar10_goes_on_from_the_committed_rows():
    wanted = grid.load(LEADERBOARDS / "grids" / "cifar10-short.toml", device="cuda")
    missing, _ = missing_in(LEADERBOARDS, wanted, retry=False)
    over = {(one.method, one.scenario.draw) for one in wanted if one not in missing and one.scenario.noise.tau == 0.7}
    assert ("fedavg", 0) in over
    assert len(over) == 27


def test_the_example_for_images_of_ones_own_adds_no_noise_and_needs_no_truth(tmp_path):
    (tmp_path / "train.csv").write_text("path,label,client\na.png,cat,north\nb.png,dog,south\nc.png,dog,north\n")
    (tmp_path / "test.csv").write_text("path,label\nd.png,cat\n")
    found = grid.load(EXAMPLES / "own.toml", device="cpu", data_root=tmp_path)
    assert len(found) == 6 * 3
    assert {one.scenario.noise_name for one in found} == {"given"}
    assert {(one.scenario.partition.law, one.scenario.clients) for one in found} == {("natural", 2)}
    assert {(one.scenario.holdout, one.evaluate_on) for one in found} == {(0.2, "noisy-validation")}
    assert not any(registry.load_method(one.method).card.told for one in found)
    words = ("--data-root", tmp_path, "--out", tmp_path / "own", "--device", "cpu")
    assert "18 of 18 runs are not over" in refused("choose", EXAMPLES / "own.toml", *words)  # which it takes for fair


def test_the_example_of_a_grid_is_what_its_comments_say():
    found = grid.load(EXAMPLES / "grid.toml", device="cpu")
    assert len(found) == 3 * 2 * 3 - 3 * 2 - 1 + 3 + 3
    assert {run.scenario.noise_name for run in found} == {"fedcova-sym", "clean"}
    assert {run.protocol.rounds for run in found} == {20}
    assert sum(run.oracle == "clean-samples" for run in found) == 3
    assert sum(run.protocol.optimiser.lr == 0.03 for run in found) == 3


def test_the_job_script_asks_for_what_the_profile_says_and_no_folder_is_made(tmp_path, tiny, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    monkeypatch.chdir(tmp_path)
    said = done("sweep", tiny, "--out", tmp_path, "--dry-run", "--slurm", EXAMPLES / "slurm.toml")
    script = said[said.index("#!") :]
    for part in (
        "#SBATCH -J flnoisebench", "#SBATCH -p gpu", "#SBATCH --cpus-per-task=8", "#SBATCH -t 08:00:00",
        "#SBATCH --gres=gpu:1", "#SBATCH -n 1", "source ~/flnoisebench/bin/activate", "--nthreads 1",
        "--resources GPU=1", "distributed.cli.dask_worker",
        "#SBATCH -e slurm-logs/flnoisebench-%J.err", "#SBATCH -o slurm-logs/flnoisebench-%J.out",
    ):  # fmt: skip
        assert part in script, part
    assert list(tmp_path.iterdir()) == [tiny]
    profile = tmp_path / "slurm.toml"
    profile.write_text((EXAMPLES / "slurm.toml").read_text().replace("log_directory", "# log_directory"))
    without = done("sweep", tiny, "--out", tmp_path, "--dry-run", "--slurm", profile)
    assert without.splitlines() == [line for line in said.splitlines() if "slurm-logs" not in line]
    profile.write_text('jobs = 1\ncores = 4\nmemory = "1GB"\nprocesses = 2\n')
    script = done("sweep", tiny, "--out", tmp_path, "--dry-run", "--slurm", profile)
    for part in ("#SBATCH --cpus-per-task=4", "--nworkers 2", "--nthreads 1"):
        assert part in script, part


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('cores = 1\nmemory = "1GB"', "jobs = N"),
        ("jobs = 2\ncores = 1", "memory is missing"),
        ('jobs = 2\ncores = 1\nmemory = "1GB"\nqeue = "gpu"', "unknown keyword 'qeue'. Did you mean queue?"),
        ('jobs = 2\ncores = 1\nmemory = "1GB"\ngpu = 4', "true or false is wanted"),
        ('jobs = 2\ncores = 1\nmemory = "1GB"\nprocesses = 0', "processes = 0: the number of runs at once"),
        ('jobs = 2\ncores = 1\nmemory = "1GB"\nprocesses = "2"', "processes = '2': the number of runs at once"),
        ("jobs =", "is not TOML"),
    ],
)
def test_a_slurm_profile_that_cannot_be_is_refused(tmp_path, tiny, text, found):
    pytest.importorskip("dask_jobqueue")
    profile = tmp_path / "slurm.toml"
    profile.write_text(text)
    assert found in refused("sweep", tiny, "--dry-run", "--slurm", profile)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--scheduler", "a:1", "--slurm", "b"), "say one"),
        (("--scheduler", "a:1", "--workers", "2"), "a cluster brings its own"),
        (("--slurm", "b", "--workers", "2"), "a cluster brings its own"),
        (("--scheduler", "a:1", "--runs-per-gpu", "2"), "several workers see one card"),
        (("--slurm", "b", "--runs-per-gpu", "2"), "several workers see one card"),
        (("--lanes", "none"), "--lanes none: write auto or a number from 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tiny, words, found):
    assert found in refused("sweep", tiny, *words)


@pytest.mark.parametrize(
    ("directive", "asks"),
    [("--gres=gpu:a100:1", True), ("--gpus=1", True), ("-G 1", True), ("--account=gpu-lab", False), ("-p gpu", False)],
)
def test_a_gpu_is_asked_for_unless_the_profile_does(directive, asks):
    """And not where an account or a partition is only called so: its workers would find none."""
    pytest.importorskip("dask_jobqueue")
    sweep = pytest.importorskip("flnoisebench.sweep")
    profile = {"jobs": 1, "cores": 1, "memory": "1GB", "gpu": True, "job_extra_directives": [directive]}
    assert ("--gres=gpu:1" not in sweep.Slurm(profile).options["job_extra_directives"]) == asks


@pytest.mark.parametrize(("unfinished", "there", "jobs"), [(9, 0, 3), (5, 0, 3), (3, 0, 2), (1, 3, 3)])
def test_there_are_as_many_slurm_jobs_as_runs_are_left_for_and_none_is_taken_away(unfinished, there, jobs):
    pytest.importorskip("dask_jobqueue")
    sweep = pytest.importorskip("flnoisebench.sweep")
    place = sweep.Slurm({"jobs": 3, "cores": 4, "memory": "1GB", "processes": 2})
    asked = []
    place._cluster = SimpleNamespace(worker_spec=range(there), scale=lambda jobs: asked.append(jobs))
    place.tend(unfinished)
    assert asked == [jobs]


def test_slurm_jobs_with_a_gpu_compute_on_it_unless_told_otherwise(tmp_path):
    pytest.importorskip("dask_jobqueue")
    profile = EXAMPLES / "slurm.toml"
    found = [place_of(device, None, 1, None, profile)[1] for device in ("auto", "cuda", "cpu")]
    assert found == ["cuda", "cuda", "cpu"]
    (tmp_path / "slurm.toml").write_text('jobs = 1\ncores = 1\nmemory = "1GB"\n')
    assert place_of("auto", None, 1, None, tmp_path / "slurm.toml")[1] == "cpu"
    with pytest.raises(ValueError, match="--device cuda needs gpu = true there"):
        place_of("cuda", None, 1, None, tmp_path / "slurm.toml")


@pytest.mark.parametrize(("named", "cards"), [("0,-1,1", ["0"]), ("3, 1", ["3"]), ("", ["0"]), ("GPU-8a,", ["GPU-8a"])])
def test_workers_are_of_the_cards_that_cuda_takes_of_those_named(monkeypatch, named, cards):
    sweep = pytest.importorskip("flnoisebench.sweep")
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert sweep.visible_cards() == cards


def test_without_dask_the_extra_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "flnoisebench.sweep", raising=False)
    monkeypatch.delattr(flnoisebench, "sweep", raising=False)
    assert "pip install 'flnoisebench[sweep]'" in refused("sweep", tiny, "--device", "cpu")


# --------------------------------------------------------------------------------------- the runs of a folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    done("run", "--method", "fedavg", "--rounds", "2", "--clients", "5", "--out", out, "--device", "cpu")
    return only_run(out)


def copies(finished: Path, out: Path, count: int) -> None:
    """That many folders of finished runs, as deep as real ones."""
    files = [(finished / name).read_bytes() for name in ("settings.json", "records.jsonl", "result.json")]
    for number in range(count):
        folder = out / "digits" / "scenario" / f"method{number % 20}" / "0123456789" / f"draw0-seed{number // 20}"
        (folder / "checkpoint" / "objects").mkdir(parents=True)
        for name, content in zip(("settings.json", "records.jsonl", "result.json"), files, strict=True):
            (folder / name).write_bytes(content)


def test_a_thousand_finished_runs_are_listed_in_half_a_second(finished, tmp_path):
    """A tenth of what benchmarks/sweep.py lists, in a tenth of its 5 s."""
    copies(finished, tmp_path, 1000)
    # This thread alone, without the collector: what else the process holds and does is not listing.
    assert min(timeit.repeat(lambda: runs.below(tmp_path), timer=time.thread_time, number=1, repeat=5)) < 0.5
    found = runs.below(tmp_path)
    assert len(found) == 1000
    accuracy = json.loads((finished / "result.json").read_text())["accuracy"]["last5_mean"]
    assert {(run.status, run.rounds, run.accuracy) for run in found} == {("complete", 2, accuracy)}


def test_runs_below_a_link_are_listed_and_a_link_to_a_folder_above_it_has_an_end(tmp_path):
    run = tmp_path / "disk" / "digits" / "run"
    run.mkdir(parents=True)
    (run / "settings.json").write_text("{}")
    (run.parent / "around").symlink_to(tmp_path / "disk")
    (run.parent / "latest").symlink_to(run)  # is no second run
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(run.parent)
    for out, folder in ((tmp_path / "disk", run), (tmp_path / "runs", tmp_path / "runs" / "digits" / "run")):
        assert [one.folder for one in runs.below(out)] == [folder]


def test_unfinished_failed_and_damaged_runs_are_listed_as_what_they_are(finished, tmp_path):
    copies(finished, tmp_path, 5)
    one, two, three, four, _ = (run.folder for run in runs.below(tmp_path))
    (one / "result.json").unlink()
    (one / "records.jsonl").write_bytes((one / "records.jsonl").read_bytes() + b'{"round": 2')  # killed in mid-line
    (two / "result.json").write_text("{")
    failed = json.loads((three / "result.json").read_text())
    (three / "result.json").write_text(json.dumps({**failed, "status": "failed", "failure": "no luck"}))
    (four / "result.json").unlink()
    first, second = (four / "records.jsonl").read_text().splitlines()
    (four / "records.jsonl").write_text(f"{first}\n{second[:40]}\n")
    said = done("list", "runs", "--out", tmp_path).splitlines()
    assert [line.split("\t")[0] for line in said] == ["unfinished", "damaged", "failed", "damaged", "complete"]
    assert said[0].split("\t")[1] == "2 rounds"
    assert said[0].split("\t")[3] == str(one)
    spent = [record.seconds["round"] for record in records.load_records(one)]
    assert runs.found(one).seconds == sum(spent) > max(spent)
    for line, file, folder in (
        (said[1], two / "result.json", two),
        (said[3], f"{four / 'records.jsonl'}, line 2", four),
    ):
        assert line.split("\t")[4].startswith(f"{file} is damaged")
        assert "the file: Invalid JSON" in line
        assert line.endswith(f"; move {folder} away, and the command that began it starts it anew")


def test_what_lies_in_a_runs_folder_is_no_further_run(finished, tmp_path):
    copies(finished, tmp_path, 1)
    (run,) = runs.below(tmp_path)
    copies(finished, run.folder / "checkpoint", 1)
    assert runs.below(tmp_path) == [run]


def test_settings_that_lack_what_a_plan_needs_are_damaged_and_no_traceback_of_every_plan(finished, tmp_path, tiny):
    copies(finished, tmp_path, 2)
    for one in runs.below(tmp_path):
        (one.folder / "result.json").unlink()
        (one.folder / "settings.json").write_text('{"method": "fedavg"}')
    assert {one.status for one in runs.below(tmp_path)} == {"damaged"}
    done("sweep", tiny, "--out", tmp_path, "--dry-run", "--device", "cpu")


def test_a_listed_run_can_be_shown_and_says_what_tells_it_from_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("run", "--rounds", "1", "--clients", "5", "--device", "cpu", "--out", "runs")
    done(*options, "--method", "fedavg", "--draw", "1")
    done(*options, "--method", "fedavg-decay", "--rho", "0.4")
    done(*options, "--method", "fedavg-decay", "--set", "final=0.5")
    lines = [line.split("\t") for line in done("list", "runs", "--out", "runs/digits").splitlines()]
    assert {tuple(sorted(line[4].split(", "))) for line in lines} == {
        ("draw=1", "method=fedavg", "noise.rho=0.6"),
        ("draw=0", "final=0.0", "method=fedavg-decay", "noise.rho=0.4"),
        ("draw=0", "final=0.5", "method=fedavg-decay", "noise.rho=0.6"),
    }
    for line in lines:
        assert done("show", line[3]).startswith("run\t")


def test_a_folder_without_runs_lists_nothing_and_one_that_is_not_there_is_refused(tmp_path):
    assert rows(done("list", "runs", "--out", tmp_path)) == {}
    assert "there is no folder" in refused("list", "runs", "--out", tmp_path / "nowhere")


def test_the_estimate_prefers_runs_of_the_same_size(tmp_path):
    def known(seconds, rounds=10, **options):
        settings = from_options({"method": "fedavg", **options}, device="cpu").model_dump(mode="json")
        return runs.Found(tmp_path, "complete", settings, rounds=rounds, seconds=seconds)

    wanted = from_options({"method": "fedavg", "clients": 5, "seed": 9}, device="cpu")
    earlier = [known(10.0, clients=20), known(9.0, 3, clients=10), known(90.0, method="fedcova", clients=5)]
    assert runs.seconds_a_round(wanted, earlier) == pytest.approx(2.0)  # (1 + 3) / 2, however long each was
    half = known(90.0, clients=5, set=["protocol.participation=0.5"])  # another budget a round
    assert runs.seconds_a_round(wanted, [*earlier, half, known(5.0, clients=5)]) == pytest.approx(0.5)
    assert runs.seconds_a_round(wanted, [known(5.0, dataset="synthetic", clients=5)]) is None
    assert runs.seconds_a_round(wanted, earlier[2:]) is None
