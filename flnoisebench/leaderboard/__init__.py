"""Leaderboards: results become rows, and every row can be computed and run again.

entries.py     what is kept of a run beside the tables
rows.py        Row, the schema of the tables, and how rows follow from entries
board.py       a leaderboard's folder: build, read, verify
naming.py      names of rows, tables and runs that say what differs
tables.py      methods x noise levels, with published numbers beside ours
comparison.py  differences paired by draw, ranks, equal budgets
agreement.py   whether a row that was run again agrees
"""

from flnoisebench.leaderboard.entries import Entry
from flnoisebench.leaderboard.rows import COLUMNS, FLAGS, REFERENCE, Row, rows_of

__all__ = ["COLUMNS", "FLAGS", "REFERENCE", "Entry", "Row", "rows_of"]
