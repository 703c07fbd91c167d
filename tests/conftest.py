"""What the runtime's tests share."""

import uuid

import fixture_methods
import pytest
import torch

from flnoisebench import profiling, records, registry
from flnoisebench.testing import tiny_run


@pytest.fixture
def loaded():
    """The fixtures' module as a run sees it: plugins given by path are imported under a name of their own."""
    import sys

    return sys.modules[registry.load_method(f"{fixture_methods.__file__}:Averaging").__module__]


@pytest.fixture(scope="module", autouse=True)
def own_device():
    """Runs see on their devices no run but this module's, whatever else is on this host: rows and figures keep apart
    what ran alone from what did not.  Its name."""
    name = f"test-{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "_identity", lambda device: f"{name}{device.index or ''}")
        yield name


@pytest.fixture
def one_thread():
    """Small matrices are slower on two threads than on one: 40 times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def finish(tmp_path):
    """finish(Method, ...) -> (result, records, Run) of a tiny run in a folder of its own."""
    count = iter(range(1000))

    def go(method, **options):
        run = tiny_run(method, tmp_path / f"out{next(count)}", **options)
        result = run.execute()
        return result, records.load_records(run.folder), run

    return go
