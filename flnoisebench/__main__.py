"""``python -m flnoisebench`` is the console script."""

from flnoisebench.cli.main import main

main()
