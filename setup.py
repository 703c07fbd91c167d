"""What pyproject.toml cannot say: a wheel or sdist says of which commit it is.  An installed copy has no checkout to
ask, and no leaderboard takes a run whose commit nobody knows."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PROVENANCE = runpy.run_path(str(Path(__file__).parent / "flnoisebench" / "provenance.py"))


def stamp(tree):
    """Write the commit into what is built.  tree: the folder that holds the package."""
    path = Path(tree) / "flnoisebench" / PROVENANCE["STAMP"]
    path.unlink(missing_ok=True)  # in an sdist it is a hard link to the checkout's own
    path.write_text(f"{PROVENANCE['commit']() or ''}\n")


class BuildPy(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            stamp(self.build_lib)


class Sdist(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        stamp(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
