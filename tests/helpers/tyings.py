"""Tyings with random trees: what is built from them must not depend on how they were grown."""

from __future__ import annotations

import itertools

import numpy as np

from speechdp.labels.hmm import StateInventory
from speechdp.labels.state_tying import Context, Node, Side, Split, StateTying


def random_tying(inventory: StateInventory, context: Context, seed: int = 0, depth: int = 2) -> StateTying:
    """Make trees that ask `depth` random questions above each leaf; those of silence ask none."""
    rng = np.random.default_rng(seed)
    phones = ["SIL", *inventory.phones]
    questions = [tuple(p for p in phones if rng.random() < 0.5) for _ in range(6)]
    sides: list[Side] = ["left"] if context == "left" else ["left", "right"]
    leaves = itertools.count()

    def tree(depth: int) -> Node:
        if depth == 0:
            return next(leaves)
        side = sides[rng.integers(len(sides))]
        return Split(side, int(rng.integers(len(questions))), tree(depth - 1), tree(depth - 1))

    trees = [tree(0 if state < 3 else depth) for state in range(inventory.num_classes)]
    return StateTying(inventory, context, questions, trees)


def separate_tying(inventory: StateInventory, context: Context) -> StateTying:
    """Make trees that give each context a class of its own."""
    phones = ["SIL", *inventory.phones]
    leaves = itertools.count()

    def tree(sides: list[Side], number: int = 0) -> Node:
        if not sides:
            return next(leaves)
        if number == len(phones) - 1:
            return tree(sides[1:])
        return Split(sides[0], number, tree(sides[1:]), tree(sides, number + 1))

    sides: list[Side] = ["left"] if context == "left" else ["left", "right"]
    trees = [tree(sides) for _ in range(inventory.num_classes)]
    return StateTying(inventory, context, [(phone,) for phone in phones], trees)
