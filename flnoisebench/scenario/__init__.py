"""Scenarios: who holds what, whose labels are wrong, and the file that pins both."""

from flnoisebench.scenario.manifest import (
    Manifest,
    Scenario,
    ScenarioSpec,
    Truth,
    build,
    check,
    diff,
    digest,
    load,
    save,
    summary,
)
from flnoisebench.scenario.noise import (
    CLASS_MAPS,
    NOISE_PRESETS,
    Corruption,
    Noise,
    corrupt,
    expected_rates,
    mean_rate,
    noise_from,
    nominal_transition,
)
from flnoisebench.scenario.partition import Partition, split

__all__ = [
    "CLASS_MAPS", "NOISE_PRESETS", "Corruption", "Manifest", "Noise", "Partition", "Scenario", "ScenarioSpec", "Truth",
    "build", "check", "corrupt", "diff", "digest", "expected_rates", "load", "mean_rate", "noise_from",
    "nominal_transition", "save", "split", "summary",
]  # fmt: skip
