"""HMM states that depend on the neighbours of their phone, tied by decision trees.

Without context a state is (phone, position in the phone).  With context, each of these states has a tree
whose questions are about the phone to the left or to the right, and whose leaves are the classes of the
network.  So every class belongs to one state without context; every context has a class, even if training
never saw it; and targets with context follow from those without.

Legend: P phones, silence (0) included; L, R: P where a class depends on that neighbour, else 1; S states of a
phone; C classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from speechdp.errors import ConfigError, one_line
from speechdp.files import cannot_be_read, write_text_atomically
from speechdp.json_input import parse_json
from speechdp.labels.hmm import STATES_PER_PHONE, IntArray, StateInventory
from speechdp.labels.lexicon import SILENCE

#: The neighbours that states depend on.
Context = Literal["left", "both"]
Side = Literal["left", "right"]

#: File beside targets of tied states that describes the tying.
TYING_NAME = "tying.json"
#: The neighbour of the first and of the last phone of an utterance.
EDGE = 0
_MAX_CONTEXTS = 1 << 26


@dataclass(frozen=True)
class Split:
    """A node that asks whether a neighbour is in a set of phones.

    Attributes:
        side: side of the neighbour.
        question: number of the set.
        yes, no: next node for each answer.
    """

    side: Side
    question: int
    yes: Node
    no: Node


#: A split, or the class of a leaf.
Node: TypeAlias = "int | Split"


class StateTying:
    """Maps phones with their neighbours to classes.

    Args:
        inventory: the states without context.
        context: the neighbours that states depend on.
        questions: sets of phones.
        trees: the tree of each state without context, in order; leaves are numbered from left (yes) to right,
            continuing from tree to tree.

    Attributes:
        table: the class of each state in each context, (L, P, R, S).
        states: the context-independent state of each class, (C,), ascending.

    Raises:
        ConfigError: there are so many phones that the table would be too large.
        ValueError: the trees are invalid.

    Example:
        >>> trees = [0, 1, 2, Split("left", 0, 3, 4), 5, 6]
        >>> tying = StateTying(StateInventory(("A",)), "left", [("SIL",)], trees)
        >>> tying.tied(np.array([3, 4, 5, 3, 4, 5], np.int32)).tolist()  # A A: only the first follows silence
        [3, 5, 6, 4, 5, 6]
    """

    def __init__(
        self,
        inventory: StateInventory,
        context: Context,
        questions: Sequence[Sequence[str]],
        trees: Sequence[Node],
    ) -> None:
        if context not in ("left", "both") or len(trees) != inventory.num_classes:
            raise ValueError("these are not the trees of these states")
        self.inventory, self.context = inventory, context
        self.questions = tuple(tuple(question) for question in questions)
        self.trees = tuple(trees)
        leaves = [list(_leaves(tree)) for tree in trees]
        if [leaf for of_tree in leaves for leaf in of_tree] != list(range(sum(map(len, leaves)))):
            raise ValueError("the leaves of the trees are not numbered in order")
        self.states: IntArray = np.repeat(np.arange(len(trees), dtype=np.int32), list(map(len, leaves)))
        self.table = self._make_table()

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.states)

    @property
    def num_phones(self) -> int:
        """P."""
        return num_phones(self.inventory)

    @property
    def looks_right(self) -> bool:
        """Whether classes also depend on the phone to the right."""
        return self.context == "both"

    def tied(self, states: IntArray) -> IntArray:
        """Return the classes, (T,), of an alignment of context-independent states, (T,)."""
        at = contexts_of(states)
        right = at.right if self.looks_right else 0
        return np.asarray(self.table[at.left, at.phone, right, at.state])

    @cached_property
    def same_left(self) -> list[list[int]]:
        """For each left neighbour, the first one with the same effect.

        With both neighbours, one list for each phone that may follow; else a single list for all of them.
        """
        if not self.looks_right:
            return [first_equal(self.table)]
        return [first_equal(self.table[:, phone]) for phone in range(self.num_phones)]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-like values; see docs/data-format.md."""
        names = self.inventory.class_names()
        return {
            "context": self.context,
            "phones": list(self.inventory.phones),
            "questions": [list(question) for question in self.questions],
            "trees": {name: _node_to_json(tree) for name, tree in zip(names, self.trees, strict=True)},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StateTying:
        """Read the result of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: the values are something else.
            ConfigError: there are too many phones.
        """
        phones = tuple(map(str, values["phones"]))
        if SILENCE in phones or len(set(phones)) < len(phones):
            raise ValueError("a phone is listed twice")
        inventory = StateInventory(phones)
        trees = values["trees"]
        if list(trees) != list(inventory.class_names()):
            raise ValueError("the trees are not those of its phones")
        questions = [tuple(map(str, question)) for question in values["questions"]]
        nodes = [_node_from_json(tree, len(questions)) for tree in trees.values()]
        return cls(inventory, values["context"], questions, nodes)

    def save(self, folder: Path) -> None:
        """Write tying.json into a folder of targets, atomically."""
        write_text_atomically(folder / TYING_NAME, json.dumps(self.to_json(), indent=1) + "\n")

    def _make_table(self) -> IntArray:
        shape, size = context_shape(self.inventory, self.context), self.num_phones
        table = np.empty(shape, np.int32)
        index = {phone: number for number, phone in enumerate((SILENCE, *self.inventory.phones))}
        sets = np.zeros((len(self.questions), size), bool)
        for number, question in enumerate(self.questions):
            sets[number, [index[phone] for phone in question]] = True
        everyone = np.arange(size)
        right = everyone if self.looks_right else np.zeros(1, np.int64)

        def fill(node: Node, state: int, left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
            if not isinstance(node, Split):
                phone, position = divmod(state, STATES_PER_PHONE)
                table[left[:, np.newaxis], phone, right, position] = node
                return
            members = sets[node.question]
            if node.side == "left":
                fill(node.yes, state, left[members[left]], right)
                fill(node.no, state, left[~members[left]], right)
            else:
                fill(node.yes, state, left, right[members[right]])
                fill(node.no, state, left, right[~members[right]])

        for state, tree in enumerate(self.trees):
            if not self.looks_right and any(split.side == "right" for split in _splits(tree)):
                raise ValueError("a tree for the left context asks for the phone to the right")
            fill(tree, state, everyone, right)
        return table


def num_phones(inventory: StateInventory) -> int:
    """Return the number of phones, silence included: P."""
    return inventory.num_classes // STATES_PER_PHONE


def context_shape(inventory: StateInventory, context: Context) -> tuple[int, int, int, int]:
    """Return the numbers of left neighbours, phones, right neighbours and states of a phone.

    Raises:
        ConfigError: there are too many phones.
    """
    size = num_phones(inventory)
    shape = (size, size, size if context == "both" else 1, STATES_PER_PHONE)
    if np.prod(shape) > _MAX_CONTEXTS:
        fewer = "left, or none" if context == "both" else "none"
        raise ConfigError(f"--context {context}: {size} phones are too many for it; give {fewer}")
    return shape


@dataclass(frozen=True)
class Contexts:
    """The context of each frame of an alignment, (T,) each: a state of a phone between two phones.

    Attributes:
        begins: whether the frame is the first of its phone.
    """

    left: IntArray
    phone: IntArray
    right: IntArray
    state: IntArray
    begins: NDArray[np.bool_]


def contexts_of(states: IntArray) -> Contexts:
    """Find phones and their neighbours in an alignment of context-independent states, (T,).

    A phone begins where the phone changes or the states begin again.  Beyond the ends is silence.
    """
    phone, state = np.divmod(states, STATES_PER_PHONE)
    begins = np.ones(len(states), bool)
    begins[1:] = (phone[1:] != phone[:-1]) | (state[1:] < state[:-1])
    sequence = np.concatenate([[EDGE], phone[begins], [EDGE]]).astype(np.int32)
    place = np.cumsum(begins)
    return Contexts(sequence[place - 1], phone, sequence[place + 1], state, begins)


def tying_in(folder: Path | None) -> StateTying | None:
    """Read the tying of the targets in a folder; None if they are not tied, or if there is no folder.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    if folder is None or not (folder / TYING_NAME).exists():
        return None
    path = folder / TYING_NAME
    remedy = f"delete {folder} and make it again"
    try:
        return StateTying.from_json(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(cannot_be_read(path, error, remedy)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged ({one_line(error)}); {remedy}") from error


def first_equal(rows: IntArray) -> list[int]:
    """Return for each entry of the first axis the index of the first entry equal to it."""
    flat = rows.reshape(len(rows), -1)
    _, first, inverse = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    found: list[int] = first[inverse.reshape(-1)].tolist()
    return found


def _leaves(node: Node) -> Iterator[int]:
    if isinstance(node, Split):
        yield from _leaves(node.yes)
        yield from _leaves(node.no)
    else:
        yield node


def _splits(node: Node) -> Iterator[Split]:
    if isinstance(node, Split):
        yield node
        yield from _splits(node.yes)
        yield from _splits(node.no)


def _node_to_json(node: Node) -> Any:
    if not isinstance(node, Split):
        return node
    return {node.side: node.question, "yes": _node_to_json(node.yes), "no": _node_to_json(node.no)}


def _node_from_json(value: Any, num_questions: int) -> Node:
    if type(value) is int:
        return value
    side: Side = "left" if "left" in value else "right"
    question = value[side]
    if type(question) is not int or not 0 <= question < num_questions:
        raise ValueError(f"{question!r} is no number of a question")
    return Split(
        side,
        question,
        _node_from_json(value["yes"], num_questions),
        _node_from_json(value["no"], num_questions),
    )
