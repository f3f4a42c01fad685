"""A trie of the pieces with failure links: greedy longest match in one pass over a word.

LinMaxMatch (Song et al., "Fast WordPiece Tokenization", arXiv 2012.15524). Walking down the trie
follows the longest match; where no edge goes on, the node's `pops` are the pieces the walk stands
for, and its failure link leads to the node of what is left of the text read so far. A walk never
reads a character twice, so a word takes time linear in its length whatever the vocabulary.

Edges lie in one open-addressing hash table of 64-bit entries, `node << 40 | code << 23 | child`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.text.character_table import PIECE_BITS
from bertsmith.text.reference import MAX_WORD
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.text.whole_words import MULTIPLIER, WholeWords, whole_words

WORD_START, WORD_INSIDE, NOWHERE = 0, 1, -1  # the two roots; no node
CHILD_BITS, CODE_BITS = 23, 17  # of 63: node and child take as many
CHILD = (1 << CHILD_BITS) - 1
NO_EDGE = -1


class Trie(NamedTuple):
    """M nodes, node 0 the start of a word, node 1 a place inside one.

    edges    int64, a power of two of them
    nodes    int32 [M, 3]: the node to go on from when no edge does (-1: the word cannot be
             matched), and where the pieces to emit before that begin and end in `pops`
    pops     int32, ids of pieces
    lengths  int32 [V], characters of each piece, without "##"
    unknown  id of [UNK]
    words    pieces that are short whole words
    """

    edges: np.ndarray
    nodes: np.ndarray
    pops: np.ndarray
    lengths: np.ndarray
    unknown: int
    words: WholeWords


def build_trie(vocabulary: Vocabulary, codes: dict[str, int]) -> Trie:
    """The trie of a vocabulary whose characters have the given codes.

    Pieces of more than `MAX_WORD` characters match no word and are left out.

    Errors: ValueError for a vocabulary too large for the layout: of more than a million pieces, 8
    million characters, or 131 thousand different ones.
    """
    ids, texts, roots = [], [], []
    for piece, number in vocabulary.ids.items():
        inside = piece[:2] == "##" and len(piece) > 2
        text = piece[2:] if inside else piece
        if 0 < len(text) <= MAX_WORD:
            ids.append(number)
            texts.append(text)
            roots.append(WORD_INSIDE if inside else WORD_START)
    joined = "".join(texts)
    for name, size, most in (
        ("pieces", len(vocabulary), 1 << PIECE_BITS),
        ("characters", len(joined), (1 << CHILD_BITS) - 3),
        ("different characters", len(codes), (1 << CODE_BITS) - 2),
    ):
        if size > most:
            raise ValueError(f"a vocabulary of {size:,} {name} is too large: {most:,} are possible")
    code_of = np.zeros(max(map(ord, codes)) + 1, np.int64)
    code_of[list(map(ord, codes))] = list(codes.values())
    letters = code_of[np.frombuffer(joined.encode("utf-32-le"), np.uint32)]
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    arrays = np.array(ids, np.int32), np.array(roots, np.int32)
    parents, node_letters, depths, pieces = _insert(letters, ends, *arrays)
    order = np.argsort(depths, kind="stable")[2:]  # without the roots
    lengths = np.zeros(len(vocabulary), np.int32)
    lengths[ids] = np.diff(ends, prepend=0)
    lengths[vocabulary.unk_id] = 1  # it may stand for one character, never for its own five
    edges, nodes, pops = _link(parents, node_letters, pieces, order)
    words = WholeWords(*whole_words(letters, ends, arrays[0], arrays[1] == WORD_START))
    return Trie(edges, nodes, pops, lengths, vocabulary.unk_id, words)


@compiled
def find_child(edges, node, code):
    """The node reached from `node` by the character `code`, or -1."""
    key = np.int64(node) << CODE_BITS | np.int64(code)
    slot = first_slot(key) & (len(edges) - 1)
    while True:
        edge = edges[slot]
        if edge >> CHILD_BITS == key:
            return edge & CHILD
        if edge == NO_EDGE:
            return NOWHERE
        slot = (slot + 1) & (len(edges) - 1)


@compiled
def first_slot(key):
    """Where the search for a key begins, in a table of up to 2^32 places: half of a product."""
    return np.int64((np.uint64(key) * MULTIPLIER) >> np.uint64(32))


@compiled
def _add_edge(edges, node, code, child):
    key = np.int64(node) << CODE_BITS | np.int64(code)
    slot = first_slot(key) & (len(edges) - 1)
    while edges[slot] != NO_EDGE:
        slot = (slot + 1) & (len(edges) - 1)
    edges[slot] = key << CHILD_BITS | np.int64(child)


@compiled
def _empty_table(num_edges):
    """A hash table with at least twice as many places as edges."""
    size = 16
    while size < 2 * num_edges:
        size *= 2
    return np.full(size, NO_EDGE, np.int64)


@compiled
def _insert(letters, ends, ids, roots):
    """Parent, letter, depth and piece (-1: none) of every node; a parent has a smaller number."""
    edges = _empty_table(len(letters))
    size = len(letters) + 2
    parents, node_letters = np.zeros(size, np.int32), np.zeros(size, np.int32)
    depths, pieces = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    num_nodes, start = 2, 0
    for k in range(len(ends)):
        node = np.int64(roots[k])
        for i in range(start, ends[k]):
            child = find_child(edges, node, letters[i])
            if child < 0:
                child = num_nodes
                num_nodes += 1
                parents[child], node_letters[child] = node, letters[i]
                depths[child] = depths[node] + 1
                _add_edge(edges, node, letters[i], child)
            node = child
        pieces[node] = ids[k]
        start = ends[k]
    return parents[:num_nodes], node_letters[:num_nodes], depths[:num_nodes], pieces[:num_nodes]


@compiled
def _link(parents, letters, pieces, order):
    """Edges, nodes and pops; `order` has the shallow nodes before the deep ones."""
    edges = _empty_table(len(parents))
    for node in order:
        _add_edge(edges, parents[node], letters[node], node)
    nodes = np.zeros((len(parents), 3), np.int32)
    nodes[:2, 0] = NOWHERE
    pops, size = np.empty(64, np.int32), 0
    for node in order:
        begin = size
        if pieces[node] >= 0:
            pops, size = _append(pops, size, pieces[node : node + 1])
            target = WORD_INSIDE
        else:
            # What the parent emits, and every node on the way from it until one has this letter.
            source = parents[node]
            while True:
                pops, size = _append(pops, size, pops[nodes[source, 1] : nodes[source, 2]])
                target = nodes[source, 0]
                if target < 0:
                    break
                child = find_child(edges, target, letters[node])
                if child >= 0:
                    target = child
                    break
                source = target
        nodes[node, 0], nodes[node, 1], nodes[node, 2] = target, begin, size
    return edges, nodes, pops[:size].copy()


@compiled
def _append(values, size, more):
    """Values with `more` behind the first `size` of them (a longer array if need be), new size."""
    end = size + len(more)
    if end > len(values):
        longer = np.empty(size + end, np.int32)
        for k in range(size):
            longer[k] = values[k]
        values = longer
    for k in range(len(more)):
        values[size + k] = more[k]
    return values, end
