"""The page: it follows from a leaderboard, is the same bytes again, and works in a real browser without a network."""

import hashlib
import html
import http.server
import json
import re
import shutil
import threading
from functools import partial
from importlib import resources

import pytest
from command_line import done, refused, rows, snapshot
from leaderboard_entries import entry, only, saved

from flnoisebench import registry
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
        found.append(run((10.0,), draw=0, method="fedavg-gce", card={"title": "Broken"}, status="failed",
                         completed=False, **said))  # fmt: skip
    found.append(run((99.0, 99.0), draw=0, oracle="clean-samples", **said))
    found.append(run((60.0,), draw=3, method="fedcova", card=CARD, status="failed", completed=False, **said))
    found.append(run((70.0, 71.0), draw=0, dataset="digits", noise="fedcova-asym"))
    found.append(run((30.0, 40.0), draw=0, dataset="cifar10"))
    return found


@pytest.fixture(scope="module")
def leaderboards(tmp_path_factory):
    return saved(entries(), tmp_path_factory.mktemp("leaderboards"))


@pytest.fixture(scope="module")
def built(leaderboards, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "site"
    site.write(leaderboards, out)
    return out


def page(folder):
    return (folder / "index.html").read_text(encoding="utf-8")


def data(folder, dataset):
    """The rows of a file of data, as the page receives them."""
    text = (folder / "data" / f"{dataset}.js").read_text()
    (content,) = re.findall(r"\Aflnoisebench\.receive\(\"[\w-]+\", (.*)\);\n\Z", text, re.DOTALL)
    return json.loads(content)


# ------------------------------------------------------------------------------------------ what the page says


def test_a_rows_curves_are_means_over_its_complete_runs_by_hand():
    runs = [
        entry((50.0, 60.0, 70.0), draw=0, seconds=1.0, images=100),
        entry((54.0, 66.0), draw=1, seconds=3.0, images=200),
        entry((0.0, 0.0, 0.0), draw=2, status="failed"),
    ]
    assert site.curves(runs) == {
        "round": [1, 2],  # as far as all got
        "accuracy": [52.0, 63.0],
        "accuracy_std": [2.83, 4.24],  # 2 sqrt(2), 3 sqrt(2)
        "label_noise": [20.0, 20.0],
        "seconds": [2.0, 4.0],
        "images": [150.0, 300.0],
    }
    assert site.curves(runs[2:]) is None


def test_a_round_without_an_accuracy_in_one_run_has_no_mean_and_one_run_has_no_deviation():
    first = entry((50.0, 60.0)).model_copy(
        update={"curves": Curves(accuracy=[None, 60.0], label_noise=[None, None], images=[1, 1], seconds=[1, 1])}
    )
    alone = site.curves([first])
    assert (alone["accuracy"], alone["accuracy_std"]) == ([None, 60.0], [None, None])
    both = site.curves([first, entry((40.0, 50.0), draw=1)])
    assert both["accuracy"] == [None, 55.0]
    assert both["label_noise"] == [None, None]


def test_a_long_curve_is_thinned_and_keeps_its_first_and_last_round():
    thinned = site.curves([entry(tuple(float(i) for i in range(500)))])
    assert len(thinned["round"]) == site.POINTS == len(thinned["accuracy"])
    assert (thinned["round"][0], thinned["round"][-1]) == (1, 500)
    assert all(round == accuracy + 1 for round, accuracy in zip(thinned["round"], thinned["accuracy"], strict=True))


def test_rows_that_differ_in_level_and_method_alone_are_one_group_and_no_oracle_is_the_best():
    lines, groups = site.grouped(rows_of(entries()))
    main = next(i for i, group in enumerate(groups) if group.dataset == "digits" and len(group.levels) == 2)
    assert groups[main].levels == ("(.4, .5)", "(.4, .7)")
    assert [(line.series, line.level, line.best) for line in lines if line.group == main] == [
        ("Fedavg", 0, False), ("Broken", 0, False), (HOSTILE, 0, False), ("FedCova", 0, True),
        ("Fedavg", 1, False), ("Broken", 1, False), (HOSTILE, 1, False), ("FedCova", 1, True),
        ("Fedavg, oracle clean-samples", 1, False),
    ]  # fmt: skip


def test_a_row_on_more_draws_says_its_mean_on_those_that_it_is_compared_on():
    runs = [entry((50.0 + 10 * draw,), draw=draw) for draw in (0, 1, 2)]
    runs += [entry((57.0,), method=method, draw=draw) for method in ("fedcova", "rofl") for draw in (0, 1)]
    lines, _ = site.grouped(site.as_shown(rows_of(runs)))
    assert [(line.series, line.accuracy.text, line.best, line.compared) for line in lines] == [
        ("Fedavg", "60.00", False, "55.00 on draws 0 1"), ("Fedcova", "57.00", True, ""), ("Rofl", "57.00", True, ""),
    ]  # fmt: skip


def test_groups_have_titles_and_series_names_that_say_what_differs():
    common = [entry((60.0,), changes=[f"protocol.batch={batch}"]) for batch in (32, 64)]
    own = [entry((60.0,), track="own", changes=[f"protocol.batch={batch}"]) for batch in (32, 64)]
    lines, groups = site.grouped(rows_of([*common, *own]))
    titles = {group.title.rpartition(", ")[2] for group in groups if "common" in group.title}
    assert titles == {"batch=32", "batch=64"}
    assert {line.series for line in lines if line.row.track == "own"} == {"Fedavg, batch=32", "Fedavg, batch=64"}


def test_rows_of_one_name_say_which_budget_they_are_of_and_budgets_do_not_mingle(tmp_path):
    half = {"changes": ["protocol.participation=0.5"]}
    runs = [
        entry((60.0,), method="fedcova"), entry((50.0,)), entry((55.0,), method="fedcova", **half),
        entry((45.0,), **half), entry((40.0, 40.0)),
    ]  # fmt: skip
    rows = site.as_shown(rows_of(runs))
    assert [row.accuracy_mean for row in rows] == [55, 45, 60, 50, 40]
    lines, _ = site.grouped(rows)
    whole, part = "1 rounds, participation=1.0", "1 rounds, participation=0.5"
    assert [line.budget for line in lines] == [part, part, whole, whole, "2 rounds"]
    site.write(saved(runs, tmp_path / "leaderboards"), tmp_path / "site")
    for said in (whole, part, "2 rounds"):
        assert f"common <small>{said}</small>" in page(tmp_path / "site")


def test_the_page_shows_the_best_of_a_scenario_first_and_bounds_and_other_images_behind():
    runs = [
        entry((60.0,), method="fedavg"),
        entry((70.0,), method="fedcova"),
        entry((65.0,), method="fednoro"),
        entry((99.0,), oracle="clean-samples"),
        entry((95.0,), method="fedcova", evaluate_on="test-a"),
        entry((50.0,), method="fedavg", dataset="cifar10"),
    ]
    shown = [(row.dataset, row.accuracy_mean) for row in site.as_shown(rows_of(runs))]
    assert shown == [("cifar10", 50), ("digits", 70), ("digits", 65), ("digits", 60), ("digits", 99), ("digits", 95)]


def test_scenarios_in_which_no_row_has_three_draws_come_last():
    three = [entry((60.0,), draw=draw) for draw in range(3)]
    two = [entry((90.0,), draw=draw, dataset="cifar10") for draw in range(2)]
    beside = [entry((70.0,), method="fedcova")]  # a single run, where another has three
    two += [entry((90.0,), draw=0, seed=1, dataset="cifar10")]  # a seed is no draw
    shown = site.as_shown(rows_of([*two, *three, *beside]))
    assert [(row.dataset, row.n) for row in shown] == [("digits", 1), ("digits", 3), ("cifar10", 3)]


def test_every_row_is_in_the_page_and_with_all_its_columns_in_its_data_set_s_file(built, leaderboards):
    wanted = site.as_shown(rows_of(entries()))
    assert re.findall(r'<tr id="(r\d+)"', page(built)) == [f"r{i}" for i in range(len(wanted))]
    for dataset in ("digits", "cifar10"):
        said = data(built, dataset)
        stated = [json.loads(json.dumps(list(row.model_dump().values()))) for row in wanted if row.dataset == dataset]
        assert [one["values"] for one in said] == stated


def cells(tr):
    """The texts of a row's cells, without their tags."""
    found = re.findall(r"<t[hd].*?</t[hd]>", tr, re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in found]


def test_a_rows_cells_by_hand(built):
    """FedCova at (.4, .7): 60 and 80, 81, 82 in the two rounds of three draws, and a fourth that failed."""
    (tr,) = [
        one
        for one in page(built).split("<tr ")[1:]
        if ">FedCova</a>" in one and 'data-level="ρ\u00a00.4, τ\u00a00.7"' in one
    ]
    assert cells(tr.split("</tr>")[0])[4:] == [
        "30.0", "common 2 rounds", "70.50 ± 0.50", "3 1 failed", "4 s × 4", "9 kB × 9", "1 kB × 1", "200 × 1",
        "class second moments; label counts", "the mean noise rate over all clients",
    ]  # fmt: skip


def test_rows_on_other_images_and_of_another_track_are_marked_and_have_filters(tmp_path):
    runs = [entry((60.0,)), entry((70.0,), evaluate_on="test-a", track="own")]
    text = site.files(saved(runs, tmp_path))["index.html"].decode()
    plain, other = (text.partition(f'<tr id="r{i}"')[2].split("</tr>")[0] for i in range(2))
    assert ">on test-a</span>" in other
    assert "test-a" not in plain.partition(">")[2]
    assert "own, 1 rounds" in cells(other)[3]  # where a narrow screen has no further columns
    assert "common" not in cells(plain)[3]
    for name, values in (("evaluate_on", ["test", "test-a"]), ("track", ["common", "own"])):
        offered = text.partition(f'<select name="{name}">')[2].partition("</select>")[0]
        assert re.findall("<option>(.*)</option>", offered) == values


def test_marks_stand_at_the_rows_that_they_belong_to(built):
    text = page(built)
    lines, _ = site.grouped(site.as_shown(rows_of(entries())))
    for i, row in enumerate(site.as_shown(rows_of(entries()))):
        tr = text[text.index(f'<tr id="r{i}"') :].split("</tr>")[0]
        assert ("<strong" in tr) == lines[i].best
        assert ('class="badge oracle"' in tr) == bool(row.oracle)
        assert (">n = 1<" in tr) == (row.n == 1)
        assert [flag for flag in FLAGS if f">{flag}</span>" in tr] == list(row.doubts)


def test_the_page_says_what_seconds_do_not_tell(built):
    costs = page(built).partition("<dt>Costs</dt>")[2].partition("</dd>")[0]
    assert "runs that shared a card or cores took longer" in costs


def test_the_page_names_every_commit_that_its_runs_were_made_by(tmp_path):
    """Those of a row too whose runs were made by several."""
    commits = ("a" * 40, "b" * 40 + "+changes")
    runs = [entry(draw=draw, environment={"commit": commit}) for draw, commit in enumerate(commits)]
    footer = site.files(saved(runs, tmp_path))["index.html"].decode().partition("<footer>")[2]
    assert re.findall(r"<code>([ab]+(?:\+changes)?)</code>", footer) == ["a" * 12, "b" * 12 + "+changes"]


def test_every_flag_is_explained(built):
    text = html.unescape(page(built))
    used = {flag for row in site.as_shown(rows_of(entries())) for flag in row.doubts}
    assert used
    assert all(FLAGS[flag] in text for flag in used)


def test_a_card_says_the_conditions_and_what_the_method_is_told(built):
    text = page(built)
    card = text[text.index('<div id="method-fedcova">') :].split("</article>")[0]
    assert "<li>class second moments</li><li>label counts</li>" in card
    assert "<li>the mean noise rate over all clients</li>" in card
    assert '<a href="https://arxiv.org/abs/2603.04062"' in card
    other = text[text.index('<div id="method-fedavg">') :].split("</article>")[0]
    assert other.count("<dd>nothing</dd>") == 2
    for method in re.findall(r'href="#(method-[\w-]+)"', text):
        assert text.count(f'id="{method}"') == 1


def test_two_cards_of_a_method_say_why_there_are_two(tmp_path):
    """Where its runs recorded two things; newcomers took it for a mistake."""
    runs = [entry(draw=draw, card={"conditions": said}) for draw, said in enumerate((["public images"], []))]
    text = site.files(saved([*runs, entry(method="fedcova")], tmp_path))["index.html"].decode()
    fedavg, fedcova = (
        text.partition(f'<div id="method-{name}">')[2].partition("<div ")[0] for name in ("fedavg", "fedcova")
    )
    assert fedavg.count("<article") == 2
    assert "2 cards: its runs recorded different things" in fedavg
    assert "cards: " not in fedcova.partition("</article>")[0]


def test_text_from_results_is_text_and_no_markup(built):
    assert "<script>document" not in page(built)
    assert "&lt;script&gt;document.title=&#39;taken&#39;&lt;/script&gt; &amp; &#34;Friends&#34;" in page(built)


def test_a_method_that_cannot_be_imported_here_has_a_card_without_departures(monkeypatch):
    """And its rows, which are of its runs alone."""
    one = entry(method="fedcova")
    assert site.cards([one])[0].departures

    def broken(name):
        raise ValueError(f"method {name!r} cannot be imported")

    monkeypatch.setattr(registry, "load_method", broken)
    assert site.cards([one])[0].departures == ()


def test_numbers_for_people():
    assert [site.size(value) for value in (0, 999, 1500, 2_340_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.34 MB",
        "5e+03 TB",
    ]
    assert [site.size(value) for value in (999.6, 999_499, 999_600)] == ["1 kB", "999 kB", "1 MB"]
    assert [site.count(value) for value in (7, 999_999, 25_000_000)] == ["7", "1 M", "25 M"]
    (row,) = rows_of([entry(seconds=1234.0)])
    assert site.Line("r0", row, 0, 0, "", False, "", "").costs[0].text == "1234 s"


def test_each_cost_stands_with_its_own_ratio():
    costs = {"seconds": 1.0, "bytes_up": 10, "bytes_down": 100, "images": 1000}
    dear = {name: (i + 2) * value for i, (name, value) in enumerate(costs.items())}
    _, row = rows_of([entry(**costs), entry(method="fedavg-relabel", **dear)])
    shown = site.Line("r0", row, 0, 0, "", False, "", "").costs
    assert [(one.text, one.beside) for one in shown] == [
        ("2 s", "× 2"), ("30 B", "× 3"), ("400 B", "× 4"), ("10 k", "× 5"),
    ]  # fmt: skip


def test_levels_are_sorted_by_the_share_of_noisy_clients_and_then_by_how_noisy_these_are():
    levels = [(0.4, 0.5), (0.4, 0.9), (0.6, 0.2)]  # the sum of the last two is less
    rows = [only([entry(noise_changes={"rho": rho, "tau": tau})]) for rho, tau in levels]
    orders = [site.Line("r0", row, 0, 0, "", False, "", "").level_order for row in rows]
    assert orders == sorted(orders)


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_builds_the_page_and_says_where(leaderboards, tmp_path):
    out = tmp_path / "public"
    said = rows(done("site", "--leaderboards", leaderboards, "--out", out))
    assert said["page"] == str(out / "index.html")
    assert said["files"] == f"{len([p for p in out.rglob('*') if p.is_file()])} written, 0 unchanged, 0 removed"


def test_the_same_leaderboard_gives_the_same_bytes_and_a_second_build_writes_nothing(built, leaderboards, tmp_path):
    elsewhere = tmp_path / "moved" / "boards"
    shutil.copytree(leaderboards, elsewhere)
    site.write(elsewhere, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(built)
    again = site.write(leaderboards, tmp_path / "again")
    assert (again.written, again.removed) == ([], [])


def test_a_build_over_an_older_one_drops_its_data_and_keeps_what_others_put_there(leaderboards, tmp_path):
    out = tmp_path / "site"
    assert site.write(leaderboards, out).written[-1] == "index.html"  # which asks for the others
    (out / "CNAME").write_text("bench.example")
    (out / "data" / "own.js").write_text("// mine")
    fewer = saved([one for one in entries() if one.settings.scenario.dataset == "digits"], tmp_path / "fewer")
    assert site.write(fewer, out).removed == ["data/cifar10.js"]
    assert (out / "CNAME").read_text() == "bench.example"
    assert (out / "data" / "own.js").exists()


def test_a_number_that_was_edited_by_hand_is_not_published(leaderboards, tmp_path):
    edited = tmp_path / "boards"
    shutil.copytree(leaderboards, edited)
    table = edited / "digits.csv"
    assert "73" in table.read_text()
    table.write_text(table.read_text().replace("73,", "83,", 1).replace(",73.0,", ",83,", 1))
    assert table.read_text() != (leaderboards / "digits.csv").read_text()
    message = refused("site", "--leaderboards", edited, "--out", tmp_path / "site")
    assert "are not what the results beside them give (first: digits, " in message
    assert f"leaderboard verify {edited}" in message
    assert not (tmp_path / "site").exists()


def test_without_a_leaderboard_or_over_somebody_elses_page_nothing_is_written(leaderboards, tmp_path):
    assert "holds no leaderboard" in refused("site", "--leaderboards", tmp_path, "--out", tmp_path / "site")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "index.html").write_text("<title>My home page</title>")
    before = snapshot(tmp_path)
    message = refused("site", "--leaderboards", leaderboards, "--out", theirs)
    assert "index.html of something else, which would be overwritten; choose another --out" in message
    assert "is a file; name a folder" in refused(
        "site", "--leaderboards", leaderboards, "--out", theirs / "index.html"
    )  # fmt: skip
    assert snapshot(tmp_path) == before


# -------------------------------------------------------------------------------------------- what it is made of


def test_the_bundled_libraries_are_the_named_versions_each_with_its_licence(built):
    vendor = resources.files("flnoisebench.report") / "assets" / "vendor"
    stated = [line.split() for line in (vendor / "README.txt").read_text().splitlines() if re.match(r"\S+\.js ", line)]
    scripts = {file.name for file in vendor.iterdir() if file.name.endswith(".js")}
    assert scripts == {line[0] for line in stated}
    assert {file.name for file in vendor.iterdir()} == scripts | {line[5] for line in stated} | {"README.txt"}
    for name, package, version, licence, _, licence_file, digest in stated:
        content = (vendor / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
        assert version.encode() in content, package
        text = (vendor / licence_file).read_text()
        assert {"MIT": "The MIT License", "ISC": "Permission to use, copy, modify, and/or distribute"}[licence] in text
        assert (built / "assets" / "vendor" / licence_file).read_text() == text


def test_nothing_in_the_page_refers_to_another_place_but_the_papers_links(built):
    text = page(built)
    links = set(re.findall(r'(?:src|href|action)="([^"#]*)', text)) - {""}
    outside = {link for link in links if not (built / link.split("?")[0]).is_file()} - {"data:,"}
    assert all(link.startswith("https://arxiv.org/abs/") for link in outside)
    for link in outside:
        assert f'<a href="{link}"' in text  # followed when clicked, and never loaded
    assert not re.search(
        r"url\(|@import|//", re.sub(r"/\*.*?\*/", "", (built / "assets/page.css").read_text(), flags=re.S)
    )


def test_a_file_that_changes_has_another_address_so_that_no_browser_keeps_an_old_one_beside_it(built):
    said = dict(re.findall(r'"((?:assets|data)/[^"?]+)\?(\w{8,})"', page(built)))
    files = {path.relative_to(built).as_posix() for kind in ("js", "css") for path in built.rglob(f"*.{kind}")}
    assert set(said) == files
    for name, digest in said.items():
        assert hashlib.sha256((built / name).read_bytes()).hexdigest().startswith(digest), name


# ------------------------------------------------------------------------------------------------ in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium with its driver here (Debian: chromium, chromium-driver)"
)


class Browser:
    """Headless Chromium on one page.  Everything that it says on the console and asks of a network is kept."""

    def __init__(self, driver):
        self.driver = driver
        self.console: list[str] = []
        self.requests: list[str] = []

    def open(self, url, *, width=1300, height=900, dark=False, scripts=True):
        cdp = self.driver.execute_cdp_cmd
        cdp("Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        cdp("Emulation.setEmulatedMedia", {"features": [scheme]})
        cdp("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        self.driver.get("about:blank")  # so that another fragment of the same page is another visit
        self.driver.get(url)
        return self

    def js(self, code, *values):
        return self.driver.execute_script(code, *values)

    def wait(self, code, *values):
        """Until the expression is true; its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 30, 0.05).until(lambda _: self.js(f"return {code}", *values), code)

    def find(self, selector):
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector):
        self.js("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()

    def choose(self, form, name, value):
        from selenium.webdriver.support.ui import Select

        Select(self.find(f"#{form} [name={name}]")).select_by_visible_text(value)

    def offered(self, form, name):
        return self.js("return [...document.querySelector(arguments[0]).options].map((one) => one.text)",
                       f"#{form} [name={name}]")  # fmt: skip

    def column(self, number):
        """The texts of a column of the table's visible rows, from the top; their small parts apart."""
        code = """return [...document.querySelectorAll("#table > tbody > tr[id]")].map((tr) => {
            const cell = tr.cells[arguments[0]].cloneNode(true);
            for (const node of cell.querySelectorAll("small, button, .badge")) node.remove();
            return cell.textContent.trim();
        })"""
        return self.js(code, number)

    def heard(self):
        """Collect what was said and asked since the last time."""
        self.console += [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]
        for one in self.driver.get_log("performance"):
            event = json.loads(one["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            if event["method"] == "Network.webSocketCreated":
                self.requests.append(event["params"]["url"])


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    selenium = pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--disable-background-networking", "--disable-component-update", "--no-first-run", "about:blank",
                 f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=selenium.webdriver.ChromeService(DRIVER))
    driver.get("about:blank")  # away from the browser's own start page
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium, built):
    """After each test: no word on the console, and no request to anywhere but the page's own folder."""
    browser = Browser(chromium)
    chromium.get("about:blank")  # the page of the test before says no more, and what it said is thrown away
    browser.heard()
    browser.console.clear()
    browser.requests.clear()
    yield browser
    browser.heard()
    assert browser.console == []
    here = (built.as_uri(), "data:", "about:", "http://127.0.0.1:")
    assert [url for url in browser.requests if not url.startswith(here)] == []


@pytest.fixture
def url(built):
    return (built / "index.html").as_uri()


DRAWN = "[...document.querySelectorAll('figure .plot')].every((plot) => plot.childElementCount)"
ACCURACY = 6  # the column


@needs_browser
def test_the_page_works_from_a_file_and_asks_for_nothing_but_its_own_files(browser, url, built):
    browser.open(url).wait(DRAWN)
    browser.heard()
    asked = {one.split("?")[0].removeprefix(built.as_uri() + "/") for one in browser.requests if built.as_uri() in one}
    assert {"index.html", "assets/page.js", "assets/page.css", "data/digits.js"} <= asked
    assert "data/cifar10.js" not in asked  # loaded when it is asked for
    assert browser.js("return document.title").startswith("flnoisebench")  # nobody's title ran as a script


@needs_browser
def test_the_page_works_from_a_web_server_in_a_folder_of_it(browser, built):
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=built.parent)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/{built.name}/").wait(DRAWN)
        assert browser.js("return document.querySelectorAll('figure svg').length") == 3
        server.shutdown()


@needs_browser
def test_the_browser_refuses_what_is_not_the_pages_own(chromium, built, tmp_path):
    """The policy in the page's head is in force: that the other tests see no request is no accident."""
    shutil.copytree(built, tmp_path / "site")
    strangers = '<img src="http://127.0.0.1:9/pixel.png"><iframe src="http://127.0.0.1:9/frame.html"></iframe>'
    planted = page(tmp_path / "site").replace("<footer>", f"{strangers}<footer>")
    (tmp_path / "site" / "index.html").write_text(planted)
    browser = Browser(chromium).open((tmp_path / "site" / "index.html").as_uri())
    browser.wait(DRAWN)
    browser.heard()
    for what in ("Loading the image 'http://127.0.0.1:9/pixel.png'", "Framing 'http://127.0.0.1:9/'"):
        assert any("Content Security Policy" in said and what in said for said in browser.console)


@needs_browser
def test_a_column_sorts_by_value_both_ways_with_what_is_missing_last(browser, url):
    browser.open(url).wait(DRAWN)
    unsorted = browser.column(ACCURACY)
    known = sorted((float(text) for text in unsorted if text != "failed"), reverse=True)
    assert (len(known), unsorted.count("failed")) == (len(unsorted) - 2, 2)
    assert known != [float(text) for text in unsorted if text != "failed"]
    head = f"#table thead th:nth-child({ACCURACY + 1})"
    for direction, wanted in (("descending", known), ("ascending", known[::-1])):
        browser.click(head)
        browser.wait("document.querySelector(arguments[0]).getAttribute('aria-sort') === arguments[1]", head, direction)
        found = browser.column(ACCURACY)
        assert [float(text) for text in found[:-2]] == wanted
        assert found[-2:] == ["failed", "failed"]
    browser.click(head)
    browser.wait("!document.querySelector(arguments[0]).hasAttribute('aria-sort')", head)
    assert browser.column(ACCURACY) == unsorted


@needs_browser
def test_a_column_sorts_by_keyboard(browser, url):
    browser.open(url).wait(DRAWN)
    browser.js("document.querySelector('#table thead th .dt-column-order').focus()")
    browser.driver.switch_to.active_element.send_keys("\ue007")  # Enter
    browser.wait("document.querySelector('#table thead th').getAttribute('aria-sort') === 'ascending'")
    names = [name for name in browser.column(0) if name != HOSTILE]  # sorted by its text, less what looks like tags
    assert names == sorted(names, key=str.lower)
    assert len(set(names)) > 3


@needs_browser
def test_filters_leave_the_rows_that_they_name_and_are_kept_in_the_address(browser, url):
    stated = site.as_shown(rows_of(entries()))
    browser.open(url).wait(DRAWN)

    def left():
        return set(browser.js("return [...document.querySelectorAll('#table > tbody > tr[id]')].map((tr) => tr.id)"))

    def wanted(keep):
        return {f"r{i}" for i, row in enumerate(stated) if keep(row)}

    assert left() == wanted(lambda row: True)
    browser.choose("filters", "dataset", "digits")
    assert left() == wanted(lambda row: row.dataset == "digits")
    browser.choose("filters", "level", "ρ\u00a00.4, τ\u00a00.7")
    assert browser.offered("choices", "level") == ["(.4, .7)"]  # and what is left of it is drawn
    browser.wait("[...document.querySelectorAll('figure .plot')].every((plot) => plot.querySelector('svg'))")
    assert left() == wanted(lambda row: row.dataset == "digits" and row.tau == 0.7 and row.rho == 0.4)
    browser.click("#filters [name=oracles]")
    expected = wanted(lambda row: row.dataset == "digits" and row.tau == 0.7 and row.rho == 0.4 and not row.oracle)
    assert left() == expected
    assert browser.find("#count").text == f"{len(expected)} of {len(stated)} rows"
    browser.find("#filters [name=search]").send_keys("second moments")
    assert browser.column(0) == ["FedCova"]
    address = browser.driver.current_url
    browser.open(address).wait(DRAWN)
    assert browser.column(0) == ["FedCova"]
    assert not browser.find("#filters [name=oracles]").is_selected()
    browser.click("#filters button[type=reset]")
    browser.wait(f"document.getElementById('count').textContent === '{len(stated)} of {len(stated)} rows'")
    assert "#" not in browser.driver.current_url
    browser.js("location.hash = '#?dataset=cifar10&oracles=no'")  # pasted where the page is open
    browser.wait("document.getElementById('count').textContent.startsWith('1 of')")
    assert left() == wanted(lambda row: row.dataset == "cifar10")
    browser.js("location.hash = '#?search=second+moments'")
    browser.wait("!document.getElementById('count').textContent.startsWith('1 of')")
    assert set(browser.column(0)) == {"FedCova"}
    assert browser.driver.current_url.endswith("#?search=second+moments")  # and not what was said before as well
    browser.click("#filters button[type=reset]")
    assert browser.open(url + "#reading").wait(DRAWN)
    assert browser.driver.current_url.endswith("#reading")  # what is no filter stays
    browser.click("#filters [name=doubted]")
    assert left() == wanted(lambda row: not row.flags)


@needs_browser
def test_filters_that_leave_nothing_say_so(browser, url):
    browser.open(url + "#?search=nosuchmethod").wait("document.querySelector('.dt-empty') !== null")
    assert "No row is left" in browser.find("#table").text
    assert browser.find("#figures-status").text == "No row is left to be drawn."
    assert browser.js("return document.querySelectorAll('figure svg').length") == 0
    browser.open(url + "#?search=broken").wait("document.getElementById('count').textContent.startsWith('2 of')")
    browser.wait("document.getElementById('figures-status').textContent")
    assert browser.find("#figures-status").text == "No row with a result is left to be drawn."


@needs_browser
def test_a_rows_details_are_all_its_columns(browser, url):
    browser.open(url).wait(DRAWN)
    (number,) = [i for i, row in enumerate(site.as_shown(rows_of(entries()))) if row.oracle]
    row = site.as_shown(rows_of(entries()))[number]
    button = f"#r{number} .more"
    browser.click(button)
    browser.wait("document.querySelector('.facts') !== null")
    assert browser.find(button).get_attribute("aria-expanded") == "true"
    names = browser.js("return [...document.querySelectorAll('.facts dt')].map((node) => node.textContent)")
    assert names == [name for name, value in row.model_dump().items() if value not in (None, "")]
    text = browser.find(".facts").text
    assert row.run_digests in text
    assert "accuracy_mean\n99 %\nthe number that tables show\n" in text
    browser.click(button)
    assert browser.js("return document.querySelector('.facts')") is None


@needs_browser
def test_a_rows_details_are_seen_whole_however_far_the_table_is_scrolled(browser, url):
    browser.open(url).wait(DRAWN)
    browser.click("#r0 .more")
    browser.wait("document.querySelector('.facts') !== null")
    ends = """const scroll = document.querySelector("#leaderboard .scroll"); scroll.scrollLeft = arguments[0];
        const boxes = [...document.querySelectorAll(".facts > div")].map((box) => box.getBoundingClientRect());
        return [scroll.scrollLeft, Math.min(...boxes.map((box) => box.left)),
            Math.max(...boxes.map((box) => box.right))]"""
    for place in (0, 400):
        scrolled, left, right = browser.js(ends, place)
        assert scrolled == place
        assert 0 <= left < right <= 1300


@needs_browser
def test_the_figures_show_the_rows_with_single_runs_open_and_oracles_dashed(browser, url):
    browser.open(url).wait(DRAWN)
    count = "return document.querySelectorAll(arguments[0]).length"
    # over noise: Fedavg and FedCova twice with three runs, the relabelling twice and the oracle once with one
    assert browser.js(count, "#robustness [aria-description='several runs'] path") == 4
    assert browser.js(count, "#robustness [aria-description='one run'] path") == 3
    assert browser.js(count, "#robustness [aria-label=rule] line") == 4  # a bar where there is a deviation
    assert browser.js(count, "#robustness [aria-description=methods] path") == 3
    middles = """return [...document.querySelectorAll("#robustness [aria-label=rule] line")].map((line) =>
        (Number(line.getAttribute("y1")) + Number(line.getAttribute("y2"))) / 2)"""
    places = """const marks = document.querySelectorAll("#robustness [aria-description='several runs'] path");
        return [...marks].map((path) => Number(path.getAttribute("transform").split(",")[1].slice(0, -1)))"""
    assert sorted(browser.js(middles)) == pytest.approx(sorted(browser.js(places)), abs=1)  # as far up as down
    browser.click("#robustness summary")
    assert "FedCova (.4, .5) 20.0 73.00 ± 0.50 n = 3" in browser.find("#robustness table").text
    browser.choose("choices", "level", "(.4, .7)")
    browser.wait("document.querySelector('#learning [aria-description=oracles] path') !== null")
    assert browser.js(count, "#learning [aria-description=methods] path") == 3
    assert browser.js(count, "#learning [aria-description='several runs'] path") == 2  # a symbol at each curve's end
    assert browser.js(count, "#learning [aria-description='one run'] path") == 2
    assert browser.find("#learning [aria-description=oracles]").get_attribute("stroke-dasharray") == "6 4"
    full = browser.js("return getComputedStyle(document.querySelector(arguments[0])).fill",
                      "#robustness [aria-description='one run'] path")  # fmt: skip
    assert full == browser.js("return getComputedStyle(document.body).backgroundColor")


@needs_browser
def test_the_costs_of_another_machine_are_not_drawn_beside_these(browser, url):
    browser.open(url).wait(DRAWN)
    points = "document.querySelectorAll('#cost [aria-label=dot] path').length"
    assert browser.js(f"return {points}") == 2
    assert browser.find("#elsewhere").text == f"Ran on another machine: {HOSTILE}."
    browser.choose("choices", "hardware", "NVIDIA H100, 1 device, serial, lanes 1")
    browser.wait(f"{points} === 1")
    browser.choose("choices", "cost", "bytes of a run, up and down")
    browser.wait(f"{points} === 3")
    assert not browser.find("#machine").is_displayed()
    assert browser.find("#elsewhere").text == ""


@needs_browser
@pytest.mark.parametrize(
    ("cost", "fedavg", "fedcova"),
    [
        ("seconds of a run", "2", "8"),  # two rounds of 1 s and of 4 s
        ("bytes of a run, up and down", "2k", "10k"),  # 1000 and 9000 up, 1000 down
        ("images trained in a run", "200", "200"),  # two rounds of 100
    ],
)
def test_the_costs_are_those_of_a_whole_run(browser, url, cost, fedavg, fedcova):
    browser.open(url).wait(DRAWN)
    browser.choose("choices", "cost", cost)
    browser.wait("document.querySelectorAll('#cost thead th')[1]?.textContent === arguments[0]", cost)
    browser.click("#cost summary")
    text = browser.find("#cost table").text
    assert f"FedCova {fedcova} 73.00 ± 0.50 n = 3" in text
    assert f"Fedavg {fedavg} 60.50 ± 0.50 n = 3" in text


@needs_browser
def test_the_curves_are_of_what_is_chosen_over_what_is_chosen_and_end_in_the_last_round(browser, url):
    browser.open(url).wait(DRAWN)
    heads = "[...document.querySelectorAll('#learning thead th')].map((one) => one.textContent).join()"
    bands = "return document.querySelectorAll('#learning [aria-label=area] path').length"
    browser.click("#learning summary")
    assert "FedCova 2 2 86.00 n = 3" in browser.find("#learning table").text
    assert browser.js(bands) > 0
    browser.choose("choices", "over", "seconds")
    browser.wait(f"{heads} === 'method,last round,seconds,accuracy, %,marks'")
    assert "FedCova 2 8 86.00 n = 3" in browser.find("#learning table").text
    browser.choose("choices", "over", "images trained")
    browser.choose("choices", "of", "wrong labels")
    browser.wait(f"{heads} === 'method,last round,images trained,wrong labels trained on, %,marks'")
    assert "FedCova 2 200 20.00 n = 3" in browser.find("#learning table").text
    assert browser.js(bands) == 0  # the accuracy's deviation is none of theirs


@needs_browser
def test_another_scenario_offers_its_own_levels(browser, url):
    browser.open(url).wait(DRAWN)
    assert browser.offered("choices", "level") == ["(.4, .5)", "(.4, .7)"]
    assert "n = 3, draws 0 1 2" in browser.js("return document.querySelector('#cost table').textContent")
    (asymmetric,) = [title for title in browser.offered("choices", "group") if "fedcova-asym" in title]
    browser.choose("choices", "group", asymmetric)
    assert browser.offered("choices", "level") == ["(.6, .7)"]
    browser.wait("document.querySelectorAll('#cost [aria-label=dot] path').length === 1")
    assert browser.find("#figures-status").text == ""


@needs_browser
def test_the_legend_takes_a_method_out_of_all_figures(browser, url):
    browser.open(url).wait(DRAWN)
    count = "document.querySelectorAll('#robustness [aria-description=methods] path').length"
    assert browser.js(f"return {count}") == 3
    browser.click("#legend input[value=FedCova]")
    browser.wait(f"{count} === 2")
    assert browser.js("return document.activeElement.value") == "FedCova"  # the keyboard stays where it is
    browser.choose("filters", "dataset", "cifar10")  # whose legend has no such method
    browser.wait("document.querySelectorAll('#legend input').length === 1")
    browser.choose("filters", "dataset", "digits")
    browser.wait(f"{count} === 2")
    assert not browser.find("#legend input[value=FedCova]").is_selected()
    browser.click("#legend input[value=FedCova]")
    browser.wait(f"{count} === 3")
    said = browser.find("#figures-status").text
    assert said == f"Not all on the same draws, so compare with care: FedCova (0 1 2); {HOSTILE} (0); Fedavg (0 1 2)."
    browser.js(
        "[...document.querySelectorAll('#legend input')].find((one) => one.value === arguments[0]).click()", HOSTILE
    )
    browser.wait("document.getElementById('figures-status').textContent === ''")


@needs_browser
def test_draws_of_one_level_that_are_hardly_noisier_are_drawn_beside_each_other(chromium, tmp_path):
    runs = [run((60.0,), wrong=34.91), *(run((70.0,), method="fedcova", wrong=34.99, draw=draw) for draw in (0, 1))]
    site.write(saved(runs, tmp_path / "leaderboards"), tmp_path / "site")
    page = Browser(chromium).open((tmp_path / "site" / "index.html").as_uri())
    page.wait(DRAWN)
    left = page.js("""return [...document.querySelectorAll("#robustness [aria-label=dot] path")].map((path) =>
        path.getBoundingClientRect().left)""")
    width = page.find("#robustness svg").rect["width"]
    assert len(left) == 2  # a row of two runs has its mark as well
    assert abs(left[0] - left[1]) < 0.1 * width


@needs_browser
def test_another_data_set_is_loaded_when_its_figures_are_asked_for(browser, url):
    browser.open(url).wait(DRAWN)
    browser.choose("filters", "dataset", "cifar10")
    browser.wait("document.querySelectorAll('#robustness [aria-label=dot] path').length === 1")
    browser.heard()
    assert any("/data/cifar10.js" in one for one in browser.requests)


@needs_browser
@pytest.mark.parametrize("width", [320, 375, 768, 800, 990])
def test_a_narrow_screen_needs_no_sideways_scrolling(browser, url, width):
    browser.open(url, width=width, height=800).wait(DRAWN)
    browser.click("#r0 .more")
    browser.wait("document.querySelector('.facts') !== null")
    for summary in ("#cost summary", "#robustness summary", "#learning summary"):
        browser.click(summary)
    assert browser.js("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    wide = """return [...document.querySelectorAll("body *")].filter((node) => !node.closest(".scroll > *") &&
        node.getClientRects().length && node.getBoundingClientRect().right > innerWidth + 1 &&
        !node.closest("svg")).map((node) => node.outerHTML.slice(0, 80))"""
    assert browser.js(wide) == []
    place = browser.find("#r1 .accuracy").rect  # what matters is there without scrolling the table either
    assert place["x"] + place["width"] <= width
    assert browser.find("#r1").text.count("digits") == 1  # wherever it stands
    level, below = (browser.find(f"#r1 .level{part}").rect for part in ("", " small"))
    assert below["x"] + below["width"] <= level["x"] + level["width"]
    assert browser.js("const {scrollWidth, clientWidth} = document.querySelector('#r1 .level small'); "
                      "return scrollWidth <= clientWidth")  # fmt: skip


@needs_browser
def test_a_long_budget_pushes_no_accuracy_off_a_narrow_screen(chromium, tmp_path):
    runs = [entry((60.0, 70.0)), entry((60.0, 70.0), changes=["protocol.optimiser.momentum=0.123456"])]
    site.write(saved(runs, tmp_path / "leaderboards"), tmp_path / "site")
    narrow = Browser(chromium).open((tmp_path / "site" / "index.html").as_uri(), width=320)
    narrow.wait(DRAWN)
    assert "momentum=0.123456" in narrow.find("#table").text
    place = narrow.find("#r0 .accuracy").rect
    assert place["x"] + place["width"] <= 320


CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgb(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function light([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}
function behind(node) {
  for (; node; node = node.parentElement) {
    const colour = rgb(getComputedStyle(node).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
}
function ratio(a, b) {
  const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
}
"""


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_readers_choice_and_can_be_read(browser, url, dark):
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for what is drawn."""
    browser.open(url, dark=dark).wait(DRAWN)
    background = browser.js(CONTRAST + "return light(behind(document.body))")
    assert background < 0.02 if dark else background > 0.9
    low = (
        CONTRAST
        + """
    return [...document.querySelectorAll("body *")].filter((node) => node.getClientRects().length &&
        [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()) && !node.closest("svg, script"))
      .map((node) => [ratio(rgb(getComputedStyle(node).color), behind(node)), node.outerHTML.slice(0, 80)])
      .filter(([found]) => found < 4.5);"""
    )
    assert browser.js(low) == []
    faint = (
        CONTRAST
        + """
    return [...Array(8).keys()].map((i) => getComputedStyle(document.documentElement).getPropertyValue(`--series-${i}`))
      .map((colour) => ratio(rgb(colour), behind(document.body))).filter((found) => found < 3);"""
    )
    assert browser.js(faint) == []
    assert browser.js("return getComputedStyle(document.querySelector('#robustness svg text')).fill") == browser.js(
        "return getComputedStyle(document.body).color"
    )


@needs_browser
def test_everything_has_a_name_for_those_who_do_not_see_it(browser, url):
    browser.open(url).wait(DRAWN)
    assert browser.js("return document.documentElement.lang") == "en"
    unnamed = """return [...document.querySelectorAll("input, select, button")].filter((node) =>
        !(node.labels?.length && node.labels[0].textContent.trim()) && !node.textContent.trim()).length"""
    assert browser.js(unnamed) == 0
    names = "return [...document.querySelectorAll('figure svg')].map((node) => node.getAttribute('aria-label'))"
    assert browser.js(names) == [
        "Accuracy against seconds of a run, a point a method",
        "Accuracy over the share of wrong labels, a line a method",
        "Learning curves: accuracy, % over rounds, a line a method",
    ]
    ids = browser.js("return [...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    for figure in ("cost", "robustness", "learning"):
        assert browser.js("return document.querySelectorAll(arguments[0]).length", f"#{figure} details tbody tr") > 0


@needs_browser
def test_without_javascript_the_whole_table_and_the_cards_can_be_read(browser, built, tmp_path):
    shutil.copytree(built, tmp_path / "site")
    shutil.rmtree(tmp_path / "site" / "assets" / "vendor")
    for script in ("assets/page.js", "data/digits.js"):
        (tmp_path / "site" / script).unlink()
    text = re.sub(r"<script.*?</script>", "", page(tmp_path / "site"), flags=re.DOTALL)
    (tmp_path / "site" / "index.html").write_text(text)
    plain = Browser(browser.driver).open((tmp_path / "site" / "index.html").as_uri())
    assert len(plain.column(0)) == len(site.as_shown(rows_of(entries())))
    assert not plain.find("#figures").is_displayed()
    assert "class second moments" in plain.find("#method-fedcova").text
    plain.heard()
    assert plain.console == []


@needs_browser
def test_a_file_of_data_that_is_missing_is_said(chromium, built, tmp_path):
    shutil.copytree(built, tmp_path / "site")
    (tmp_path / "site" / "data" / "digits.js").unlink()
    browser = Browser(chromium).open((tmp_path / "site" / "index.html").as_uri())
    assert "cannot be loaded" in browser.wait("document.getElementById('figures-status').textContent")
    browser.click("#r0 .more")
    assert "cannot be loaded" in browser.wait("document.querySelector('#table [role=alert]')?.textContent")
    shutil.copy(built / "data" / "digits.js", tmp_path / "site" / "data")  # and is there when it is asked for again
    for _ in range(2):
        browser.click("#r0 .more")
    browser.wait("document.querySelector('.facts') !== null")
    assert len(browser.column(0)) == len(site.as_shown(rows_of(entries())))


@needs_browser
def test_many_rows_come_in_pages_and_are_filtered_as_a_whole(chromium, tmp_path):
    many = [
        run((float(i % 97),), draw=0, noise_changes={"rho": round(0.005 * (i + 1), 3), "tau": 0.5},
            card={"title": f"Method {i % 20}"}) for i in range(120)
    ]  # fmt: skip
    site.write(saved(many, tmp_path / "boards"), tmp_path / "site")
    browser = Browser(chromium).open((tmp_path / "site" / "index.html").as_uri())
    browser.wait(DRAWN)
    assert len(browser.column(0)) == 50
    assert browser.find("#count").text == "120 of 120 rows"
    assert browser.js("return document.querySelectorAll('#robustness [aria-label=dot] path').length") == 120
    marks = """return [...document.querySelectorAll("#legend svg")].map((svg) =>
        svg.style.color + svg.lastElementChild.getAttribute("d"))"""
    assert len(set(browser.js(marks))) == len(browser.js(marks)) == 20  # no two methods look the same
    browser.click(f"#table thead th:nth-child({ACCURACY + 1})")
    browser.wait("document.querySelector('#table thead [aria-sort=descending]') !== null")
    assert browser.column(ACCURACY)[0] == "96.00"
    browser.click(".dt-paging button.next")
    browser.wait("document.querySelector('.dt-paging button.current').textContent === '2'")
    assert browser.column(ACCURACY)[0] == f"{sorted((float(i % 97) for i in range(120)), reverse=True)[50]:.2f}"
