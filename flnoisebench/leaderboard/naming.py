"""Names that say what differs: of the rows of a table, of tables and arenas, of the lines and panels of a figure.

Two things that may not be confused have two names, and a name holds what tells it from the others beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from flnoisebench.leaderboard.rows import BUDGET, PLACE, TRAINING, Row

T = TypeVar("T", bound=Hashable)


def told_apart(names: Mapping[T, str], facts: Callable[[T], Mapping[str, Any]]) -> dict[T, str]:
    """The names, and where several have one, with those of their facts that differ among them: ``fedavg, lr=0.1``."""
    alike: dict[str, list[T]] = defaultdict(list)
    for one, name in names.items():
        alike[name].append(one)
    found: dict[T, str] = {}
    for name, same in alike.items():
        said = {one: facts(one) for one in same} if len(same) > 1 else {}
        known = dict.fromkeys(fact for one in said.values() for fact in one)
        differing = [fact for fact in known if any(one.get(fact) != said[same[0]].get(fact) for one in said.values())]
        for one in same:
            parts = [name] if name else []
            parts += [f"{fact}={'none' if (value := said[one].get(fact)) is None else value}" for fact in differing]
            found[one] = ", ".join(parts)
    return {one: found[one] for one in names}


def table_of(row: Row) -> tuple[Any, ...]:
    """What the rows of one table share: all but noise level and method (in the track own also how clients train)."""
    _, *federation = row.scenario.split("_")
    return row.noise, *federation, *(getattr(row, name) for name in row.arena_columns if name != "scenario")


def by_table(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each table, in the order of the rows."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[table_of(row)].append(row)
    return list(found.values())


def names(rows: Iterable[Row]) -> dict[Row, str]:
    """The rows' names wherever people read them.  Where those of two rows of a table would be equal though their
    settings are not, with what differs in how clients train, and where nothing does, with the settings' digits."""
    found: dict[Row, str] = {}
    for group in by_table(rows):
        own = told_apart({row: row.name for row in group}, lambda row: {name: getattr(row, name) for name in TRAINING})
        found |= told_apart(own, lambda row: {"settings": row.settings})
    return found


def budgets(rows: Iterable[Row]) -> dict[Row, str]:
    """The rows' budgets where rows of all tables stand in one: the rounds, and where rows of one name, place and track
    had as many, what else differs: ``120 rounds, participation=0.5``."""
    rows = list(rows)
    own = names(rows)
    alike: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        alike[own[row], row.rounds, *(getattr(row, name) for name in PLACE)].append(row)
    found: dict[Row, str] = {}
    for same in alike.values():
        said = {row: f"{row.rounds} rounds" for row in same}
        found |= told_apart(said, lambda row: {name: getattr(row, name) for name in (*BUDGET, *TRAINING)})
    return found


def titles(groups: Iterable[list[Row]], title: Callable[[Row], str]) -> list[str]:
    """A title for each group of rows that share table or arena, and where several would have one, with what differs
    in their budgets, or in the scenario beyond noise, partition and clients.  title: of a group's first row."""
    first = [group[0] for group in groups]

    def facts(i: int) -> dict[str, Any]:
        row = first[i]
        said = {name: getattr(row, name) for name in row.arena_columns}
        return {**said, "scenario": "_".join(row.scenario.split("_")[3:]) or None}

    return list(told_apart({i: title(row) for i, row in enumerate(first)}, facts).values())
