"""Scenarios: who holds what, whose labels are wrong, and the file that pins both."""

from flnoisebench.scenario.class_maps import CLASS_MAPS
from flnoisebench.scenario.corruption import Sources, corrupt, mean_rate, settled_facts
from flnoisebench.scenario.manifest import (
    Manifest,
    Scenario,
    ScenarioSpec,
    Truth,
    build,
    check,
    diff,
    digest,
    encoded,
    foreign_digest,
    incomparable,
    load,
    read_split,
    realised_pairs,
    remarks,
    reordered,
    save,
    split_clients,
    summary,
)
from flnoisebench.scenario.noise import (
    NOISE_PRESETS,
    PRESET_PARTITIONS,
    Noise,
    noise_from,
    noise_from_file,
    noise_name,
    parts,
)
from flnoisebench.scenario.partition import PARTITION_LAWS, PARTITION_READS, Partition, found, pinned, split

__all__ = [
    "CLASS_MAPS", "NOISE_PRESETS", "PARTITION_LAWS", "PARTITION_READS", "PRESET_PARTITIONS", "Manifest",
    "Noise", "Partition", "Scenario", "ScenarioSpec", "Sources", "Truth", "build", "check", "corrupt", "diff",
    "digest", "encoded", "foreign_digest", "found", "incomparable", "load", "mean_rate", "noise_from",
    "noise_from_file", "noise_name", "parts", "pinned", "read_split", "realised_pairs", "remarks", "reordered", "save",
    "settled_facts", "split", "split_clients", "summary",
]  # fmt: skip
