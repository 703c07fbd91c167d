"""A scenario as a picture: who holds what, how noisy everybody is, which classes are mistaken for which, and samples.

matplotlib is an extra and is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flnoisebench.scenario.manifest import Scenario, Truth, summary
from flnoisebench.streams import numpy_stream

FORMATS = (".png", ".svg")
SHEET = (4, 10)  # rows and columns of the sample sheet
CLEAN, NOISY = "#3b6ea5", "#c8553d"


class Sample(NamedTuple):
    """A training sample to be shown.  pixels: uint8 [C, H, W]; true: None where it is unknown, -1 for another data
    set's image."""

    position: int
    pixels: npt.NDArray[np.uint8]
    given: int
    true: int | None


def chosen(scenario: Scenario, truth: Truth) -> npt.NDArray[np.int64]:
    """The positions of the sample sheet: wrongly labelled ones in its first half as far as there are, then right ones;
    drawn from a stream of their own, so the same scenario shows the same ones."""
    count = min(SHEET[0] * SHEET[1], len(scenario.owner))
    order = numpy_stream("scenario", scenario.spec.dataset, scenario.spec.draw, "sheet").permutation(
        len(scenario.owner)
    )
    if truth.true is None:
        return order[:count]
    wrong = scenario.given[order] != truth.true[order]
    first = order[wrong][: count // 2]
    return np.concatenate([first, order[~wrong], order[wrong][len(first) :]])[:count]


def require(path: Path) -> None:
    """Raise ValueError for a file that is no picture's, and where matplotlib is not installed."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a picture's name ends in {' or '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install 'flnoisebench[plots]'") from error


def draw(
    path: Path, scenario: Scenario, truth: Truth, *, names: Sequence[str] = (), samples: Sequence[Sample] = ()
) -> None:
    """Write the picture; its ending, png or svg, says how.

    names: of the classes (default: numbers).  samples: for the sheet, which is left out without any.  Equal scenarios
    give equal SVG files.  Raises ValueError as ``require`` does.
    """
    require(path)
    import matplotlib
    from matplotlib.figure import Figure

    facts = summary(scenario, truth)
    labels = list(names) if len(names) == scenario.classes else [str(c) for c in range(scenario.classes)]
    known = facts["realised_rate"] is not None
    tall = min(max(0.22 * scenario.spec.clients, 3.5), 14.0)
    heights = [tall, 4.5 if known else 0, 1.25 * SHEET[0] if samples else 0]
    figure = Figure(figsize=(12, sum(heights) + 1.2), layout="constrained")
    grid = figure.add_gridspec(sum(h > 0 for h in heights), 1, height_ratios=[h for h in heights if h])
    figure.suptitle(_title(scenario, facts), fontsize=11)
    top = grid[0].subgridspec(1, 2, width_ratios=[3, 1]) if known else grid[0].subgridspec(1, 1)
    clients = figure.add_subplot(top[0])
    _bubbles(clients, facts, labels, "true" if known else "given")
    if known:
        _rates(figure.add_subplot(top[1], sharey=clients), facts)
        _matrices(figure, grid[1].subgridspec(1, 2), facts, labels)
    if samples:
        _sheet(figure, grid[2 if known else 1].subgridspec(*SHEET), samples, labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "flnoisebench"}):  # else its ids change with every drawing
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=120)


def _title(scenario: Scenario, facts: dict[str, Any]) -> str:
    rate = facts["realised_rate"]
    noise = "noise unknown" if rate is None else f"{rate:.1%} of {facts['samples']} labels wrong"
    return f"{scenario.spec.dataset}, {scenario.spec.slug}, draw {scenario.spec.draw}: {noise}"


def _ticks(axis: Any, labels: Sequence[str], most: int, **style: Any) -> None:
    """All labels where there is room, else every k-th, as they are: dollars set no formula."""
    step = -(-len(labels) // most)
    shown = [labels[i] for i in range(0, len(labels), step)]
    axis.set_ticks(range(0, len(labels), step), shown, parse_math=False, **style)


def _bubbles(axes: Any, facts: dict[str, Any], labels: Sequence[str], by: str) -> None:
    counts = np.array([row["counts"] for row in facts["clients"]])
    m, classes = np.nonzero(counts)
    noisy = np.array([bool(row["noisy"]) for row in facts["clients"]])
    room = (72 * 8 / max(len(labels), 1), 72 * 5 / max(len(counts), 1))  # points for one bubble, about
    largest = min(*room, 22) ** 2
    axes.scatter(
        classes, m, s=counts[m, classes] / counts.max() * largest, c=[NOISY if noisy[i] else CLEAN for i in m], lw=0
    )
    axes.set(xlabel=f"class, by {by} label", ylabel="client", xlim=(-0.7, len(labels) - 0.3))
    axes.set_title(f"samples (largest {counts.max()}); noisy clients in red", fontsize=9)
    axes.set_ylim(len(counts) - 0.4, -0.6)
    long = max(map(len, labels)) > 3
    _ticks(axes.xaxis, labels, 50, rotation=90 if long or len(labels) > 20 else 0, fontsize=8)
    _ticks(axes.yaxis, [str(i) for i in range(len(counts))], 50, fontsize=8)


def _rates(axes: Any, facts: dict[str, Any]) -> None:
    rows = facts["clients"]
    where = np.arange(len(rows))
    axes.barh(where, [row["realised"] for row in rows], height=0.7, color=NOISY, label="wrong labels")
    axes.plot([row["expected"] for row in rows], where, "|", color="black", ms=7, label="expected by the law")
    axes.plot([row["nominal"] for row in rows], where, "o", color="black", mfc="white", ms=4, label="nominal")
    axes.set(xlabel="share of the client's samples", xlim=(0, 1))
    axes.set_title("noise", fontsize=9)
    axes.tick_params(labelleft=False)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.06), frameon=False)


def _matrices(figure: Any, grid: Any, facts: dict[str, Any], labels: Sequence[str]) -> None:
    for place, which in zip(grid, ("nominal", "realised"), strict=True):
        axes = figure.add_subplot(place)
        matrix = np.array(facts["transition"][which])
        shown = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
        axes.set(xlabel="given label", ylabel="true label")
        axes.set_title(f"{which} transitions", fontsize=9)
        _ticks(axes.xaxis, labels, 25, rotation=90, fontsize=7)
        _ticks(axes.yaxis, labels, 25, fontsize=7)
        if len(labels) <= 14:
            for (row, column), share in np.ndenumerate(matrix):
                if share >= 0.005:
                    colour = "black" if share > 0.6 else "white"
                    text = f"{share:.2f}"
                    axes.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
        figure.colorbar(shown, ax=axes, shrink=0.8)


def _sheet(figure: Any, grid: Any, samples: Sequence[Sample], labels: Sequence[str]) -> None:
    for place, sample in zip(grid, samples, strict=False):
        axes = figure.add_subplot(place)
        pixels = sample.pixels.transpose(1, 2, 0)
        axes.imshow(pixels[..., 0] if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
        axes.set(xticks=[], yticks=[])
        text, right = labels[sample.given], sample.true in (None, sample.given)
        if not right:
            text += "\nnone of these" if sample.true == -1 else f"\nis {labels[sample.true or 0]}"
        axes.set_title(text, fontsize=7, color="black" if right else NOISY, pad=2, parse_math=False)


# ------------------------------------------------------------------------------------------ in the terminal

GLYPHS = " ·∘○●"


def glyphs(counts: Sequence[int], largest: int) -> str:
    """A character for each class: blank for none, then by quarters of the largest count."""
    return "".join(GLYPHS[-(-4 * count // max(largest, 1))] for count in counts)


def confusions(scenario: Scenario, truth: Truth) -> list[tuple[int, int, float, float]]:
    """(true, given, nominal, realised) of the five most frequent wrong transitions by the law; none without a truth."""
    facts = summary(scenario, truth)["transition"]
    if facts["nominal"] is None:
        return []
    nominal, realised = np.array(facts["nominal"]), np.array(facts["realised"])
    wrong = nominal - np.diag(np.diag(nominal))
    order = np.argsort(-wrong, axis=None, kind="stable")[:5]
    pairs = [divmod(int(i), len(wrong)) for i in order]
    return [(y, j, float(nominal[y, j]), float(realised[y, j])) for y, j in pairs if wrong[y, j] > 0]


def samples_of(
    scenario: Scenario, truth: Truth, images: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64]
) -> list[Sample]:
    """The samples at these positions.  images: uint8 [n, C, H, W], as they are trained on."""
    true = truth.true
    return [
        Sample(int(i), images[i], int(scenario.given[i]), None if true is None else int(true[i])) for i in positions
    ]
