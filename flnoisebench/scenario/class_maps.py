"""Which classes are mistaken for which: class maps by name, for a data set's published order of classes."""

from __future__ import annotations

# The official coarse label of each fine label of CIFAR-100 (Krizhevsky 2009), fine labels in alphabetical order.
# Blocks of five fine ids are no superclasses: only 6 of 100 such pairs share one.
CIFAR100_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1,
    10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12,
    12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0,
    17, 8, 14, 13,
)  # fmt: skip


def _next_in_group(groups: tuple[int, ...]) -> tuple[int, ...]:
    """For each class the next class of its group, the last one going back to the first."""
    members = {g: [c for c, other in enumerate(groups) if other == g] for g in groups}
    return tuple(members[g][(members[g].index(c) + 1) % len(members[g])] for c, g in enumerate(groups))


def _others_in_group(groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each class all other classes of its group."""
    return tuple(tuple(c for c, h in enumerate(groups) if h == g and c != own) for own, g in enumerate(groups))


# Entry c: what class c is mistaken for, or several, any of which with the same probability; c itself: it stays right.
CLASS_MAPS: dict[str, tuple[int | tuple[int, ...], ...]] = {
    # truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog (Patrini et al., CVPR 2017)
    "cifar10-semantic": (0, 1, 0, 5, 7, 3, 6, 7, 8, 1),
    # 7 -> 1, 2 -> 7, 5 <-> 6, 3 -> 8 (Patrini et al., CVPR 2017)
    "mnist-semantic": (0, 1, 7, 8, 4, 6, 5, 1, 8, 9),
    "cifar100-superclass-next": _next_in_group(CIFAR100_COARSE),
    "cifar100-superclass-uniform": _others_in_group(CIFAR100_COARSE),
    # FedNoisy's (Liang et al. 2023) blocks of five class numbers, meant as superclasses, which they are not
    "cifar100-block5-legacy": _next_in_group(tuple(c // 5 for c in range(100))),
}
