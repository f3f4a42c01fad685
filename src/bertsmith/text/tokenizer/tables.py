"""Tables of one vocabulary and normalization that the kernel looks up.

Characters: `CharacterTable`, an entry a code point. Entries come from `unicodedata` through the
reference code, 256 code points at a time and only where a text has them: nothing on disk can belong
to another version of Unicode, and a tokenizer is ready at once. A positive entry is a letter: its
code among the characters of the vocabulary, or UNKNOWN_LETTER. Negative ones end a word:
WHITE_SPACE; WORD_BY_ITSELF - a piece's id, for punctuation; IDEOGRAPH - a piece's id. The kernel
turns a text into these symbols. All else is below RARE, in 32 bits: 1, kind (3), combining class
(8; see `_combining`), value (20).

Short words that are pieces as they stand are found in one step, as nine in ten words of English
prose are (BERT's 30,522 uncased pieces: 91% in SST-2, 92% in WikiText-2, 94% in novels). A word of
up to 16 letters with codes below 256 is a number of 128 bits, a byte a letter.

All pieces: a `Trie` with failure links, for greedy longest match in one pass over a word
(LinMaxMatch, Song et al., "Fast WordPiece Tokenization", arXiv 2012.15524). The walk down the trie
follows the longest match; where no edge goes on, the node's `pops` are the pieces matched so far,
and its failure link leads to the node of the letters that are left: no character is read twice.
Edges lie in one open-addressing hash table of 64-bit entries, `node << 40 | code << 23 | child`.
"""

from __future__ import annotations

import sys
import unicodedata
from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.text.tokenizer.normalize import (
    CHUNK,
    Normalization,
    is_dropped,
    is_ideograph,
    is_latin,
    is_punctuation,
    second_characters,
    split_words,
)
from bertsmith.text.tokenizer.wordpiece import MAX_WORD, Vocabulary

PAGE = 256
UNFAMILIAR = 0  # no entry yet: the page must be filled
UNKNOWN_LETTER = 1  # in no piece
WHITE_SPACE = -1
WORD_BY_ITSELF = -2
PIECE_BITS = 20
IDEOGRAPH = WORD_BY_ITSELF - (1 << PIECE_BITS)
RARE = -(1 << 22)
VALUE, KIND_SHIFT, CLASS_SHIFT = (1 << PIECE_BITS) - 1, 28, 20
(
    DROPPED,
    REFERENCE,  # depends on its neighbours: the word takes the reference path
    COMBINING,  # a letter, the value its code, that must be in order
    LATIN,  # the same, from which the marks that follow are stripped
    MARK,  # the same, dropped after a Latin letter
    EXPANSION,  # none or several characters, in `expansions` at the value
    LATIN_EXPANSION,
) = range(7)
MOST_CHARACTERS = 8  # that one becomes, and more
NEUTRAL, OUT_OF_ORDER = -1, -2  # in place of a combining class

LONGEST, LETTERS = 16, 256  # of a short word, in letters; codes of letters are below
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio

WORD_START, WORD_INSIDE, NOWHERE = 0, 1, -1  # the two roots of the trie; no node
CHILD_BITS, CODE_BITS = 23, 17  # of 63: node and child take as many
CHILD = (1 << CHILD_BITS) - 1
NO_EDGE = -1


class CharacterTable:
    """The entries of a vocabulary and a normalization.

    codes       character -> code, from 2; the characters of the vocabulary's pieces
    entries     int32 [0x110000], UNFAMILIAR where the page has not been filled
    expansions  int32; at an entry's value the number of characters and then each one
    """

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization):
        self.vocabulary = vocabulary
        self.normalization = normalization
        characters = sorted(set("".join(vocabulary.pieces)))
        self.codes = {c: code for code, c in enumerate(characters, UNKNOWN_LETTER + 1)}
        # Untouched pages of zeros take no memory. Neither array is ever replaced by a larger one,
        # so that a thread may read while another fills pages: 2^17 holds the 11,172 Hangul
        # syllables and every other character that expands.
        self.entries = np.zeros(sys.maxunicode + 1, np.int32)
        self.expansions = np.zeros(1 << 17, np.int32)
        self.num_expansions = 0
        self.fill(np.zeros(1, np.int64))

    def fill(self, pages: np.ndarray) -> None:
        """Make the entries of pages (code point // 256) that have none."""
        for page in pages.tolist():
            start = page * PAGE
            if self.entries[start] == UNFAMILIAR:
                entries = [self._entry(chr(code)) for code in range(start, start + PAGE)]
                self.entries[start : start + PAGE] = entries

    def _entry(self, character: str) -> int:
        normalization = self.normalization
        if not CHUNK.match(character):
            return WHITE_SPACE
        if is_dropped(character):
            return _rare(DROPPED)
        if _needs_neighbours(character, normalization):
            return _rare(REFERENCE)
        becomes = [character]
        is_mark = unicodedata.category(character)[0] == "M"
        # The condition spares most characters nine tenths of the time.
        if is_mark or not unicodedata.normalize("NFD", character) == character == character.lower():
            words = split_words(character, normalization)
            becomes = [part for word in words for part in word.characters]
        combining = _combining(character, becomes, normalization)
        if combining < 0:
            return _rare(DROPPED if combining == NEUTRAL else REFERENCE)
        latin = False
        if normalization.strip_accents == "latin":
            if unicodedata.category(character) == "Mn":
                return _rare(MARK, combining, self._code(character))
            latin = is_latin(unicodedata.normalize("NFD", becomes[0])[0])
        if len(becomes) != 1:
            assert len(becomes) <= MOST_CHARACTERS, character
            index = self.num_expansions
            self.num_expansions += 1 + len(becomes)
            self.expansions[index] = len(becomes)
            self.expansions[index + 1 : self.num_expansions] = [self._symbol(c) for c in becomes]
            return _rare(LATIN_EXPANSION if latin else EXPANSION, combining, index)
        [one] = becomes
        if normalization.split_cjk and is_ideograph(character):
            return IDEOGRAPH - self._piece(one)
        if (latin or combining) and not is_punctuation(one):
            return _rare(LATIN if latin else COMBINING, combining, self._code(one))
        return self._symbol(one)

    def _symbol(self, character: str) -> int:
        punctuation = is_punctuation(character)
        return WORD_BY_ITSELF - self._piece(character) if punctuation else self._code(character)

    def _code(self, character: str) -> int:
        return self.codes.get(character, UNKNOWN_LETTER)

    def _piece(self, character: str) -> int:
        return self.vocabulary.ids.get(character, self.vocabulary.unk_id)


def _rare(kind: int, combining: int = 0, value: int = 0) -> int:
    return -(1 << 31) | kind << KIND_SHIFT | combining << CLASS_SHIFT | value


def _combining(character: str, becomes: list[str], normalization: Normalization) -> int:
    """The class by which the kernel checks the order of combining characters; 0 for no order.

    Where text is brought to a form of Unicode it is the character's own. Otherwise order matters
    only when all accents are stripped, among the combining characters that stay. Those that go are
    `NEUTRAL`; what becomes a base and a combining character that stays is `OUT_OF_ORDER`.
    """
    strips = normalization.strip_accents == "all"
    classes = [unicodedata.combining(c) for c in becomes]
    if strips and any(classes) and len(classes) > 1:
        return OUT_OF_ORDER
    if normalization.unicode != "none":
        return unicodedata.combining(character)
    if not strips:
        return 0
    if becomes:
        return classes[0]  # of several all are 0
    parts = unicodedata.normalize("NFD", character)
    return NEUTRAL if all(map(unicodedata.combining, parts)) else 0


def _needs_neighbours(character: str, normalization: Normalization) -> bool:
    """True if the result of a character depends on more than itself and its combining class."""
    if character == "\u03a3" and normalization.lowercase:
        return True  # a final sigma is written differently
    if normalization.unicode == "none":
        return False
    form = "NFC" if normalization.unicode == "nfc" else "NFKC"
    return character in second_characters() or unicodedata.normalize(form, character) != character


@compiled
def _enter_words(numbers, pieces, letters, ends, ids, roots):
    """Fill the table of short words; pieces come as in `_insert`."""
    begin = 0
    for piece in range(len(ends)):
        end = ends[piece]
        if roots[piece] == WORD_START and end - begin <= LONGEST:
            last, first, seen = np.int64(0), np.int64(0), np.int64(0)
            for k in range(begin, end):
                last, first = longer(last, first, letters[k])
                seen |= letters[k]
            slot = first_slot(last + 31 * first) & (len(pieces) - 1)
            while numbers[slot, 0] != 0:
                slot = (slot + 1) & (len(pieces) - 1)
            if seen < LETTERS:
                numbers[slot, 0], numbers[slot, 1], pieces[slot] = last, first, ids[piece]
        begin = end


@compiled
def longer(last, first, letter):
    """The number of a word with one more letter."""
    return last << 8 | letter, first << 8 | last >> 56 & 255


@compiled
def find_word(symbols, start, numbers, pieces):
    """The piece that is the word at `start`, or -1, and the end of the word."""
    letter = np.int64(symbols[start])
    last, first, seen, end = letter, np.int64(0), letter, start + 1
    letter = np.int64(symbols[end])
    while letter > 0:
        last, first = longer(last, first, letter)
        seen |= letter
        end += 1
        letter = np.int64(symbols[end])
    if seen < LETTERS and end - start <= LONGEST:
        mask = len(pieces) - 1
        slot = first_slot(last + 31 * first) & mask
        while numbers[slot, 0] != 0:
            if numbers[slot, 0] == last and numbers[slot, 1] == first:
                return np.int64(pieces[slot]), end
            slot = (slot + 1) & mask
    return np.int64(-1), end


class Trie(NamedTuple):
    """M nodes; node 0 is the start of a word, node 1 the inside of one.

    edges    int64, a power of two of them
    nodes    int32 [M, 3]: the node to go on from when no edge does (-1: the word cannot be
             matched), start and end in `pops` of the pieces to emit before that
    pops     int32, ids of pieces
    lengths  int32 [V], characters of each piece, without "##"
    unknown  id of [UNK]
    numbers  int64 [P, 2], a hash table of short whole words, P a power of two: the last eight
             letters and those before them, 0 in a free slot
    pieces   int32 [P], their ids
    """

    edges: np.ndarray
    nodes: np.ndarray
    pops: np.ndarray
    lengths: np.ndarray
    unknown: int
    numbers: np.ndarray
    pieces: np.ndarray


def build_trie(vocabulary: Vocabulary, codes: dict[str, int]) -> Trie:
    """Build the trie of the pieces of up to `MAX_WORD` characters, which have the given codes.

    Errors: ValueError for more than a million pieces, 8 million characters, or 131 thousand
    different ones.
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
    given = letters, ends, np.array(ids, np.int32), np.array(roots, np.int32)
    parents, node_letters, depths, piece_of = _insert(_empty_edges(len(letters)), *given)
    order = np.argsort(depths, kind="stable")[2:]  # without the roots
    edges = _empty_edges(len(parents))
    nodes, pops = _link(edges, parents, node_letters, piece_of, order)
    lengths = np.zeros(len(vocabulary), np.int32)
    lengths[ids] = np.diff(ends, prepend=0)
    lengths[vocabulary.unk_id] = 1  # it may stand for one character, never for its own five
    slots = _num_slots(len(ids))
    numbers, pieces = np.zeros((slots, 2), np.int64), np.zeros(slots, np.int32)
    _enter_words(numbers, pieces, *given)
    return Trie(edges, nodes, pops, lengths, vocabulary.unk_id, numbers, pieces)


def _num_slots(num_entries: int) -> int:
    """Size of a hash table: a power of two, at least twice the entries."""
    return 1 << max(4, (2 * num_entries - 1).bit_length())


def _empty_edges(num_edges: int) -> np.ndarray:
    return np.full(_num_slots(num_edges), NO_EDGE, np.int64)


@compiled
def first_slot(key):
    """First slot to search for a key, in a table of up to 2^32 slots."""
    return np.int64((np.uint64(key) * MULTIPLIER) >> np.uint64(32))


@compiled
def find_child(edges, node, code):
    """The node reached from `node` by the character `code`, or -1."""
    edge = edges[_slot(edges, node, code)]
    return edge & CHILD if edge != NO_EDGE else NOWHERE


@compiled
def _add_edge(edges, node, code, child):
    key = np.int64(node) << CODE_BITS | np.int64(code)
    edges[_slot(edges, node, code)] = key << CHILD_BITS | np.int64(child)


@compiled
def _slot(edges, node, code):
    """The slot of an edge, or the empty one where it belongs."""
    key = np.int64(node) << CODE_BITS | np.int64(code)
    slot = first_slot(key) & (len(edges) - 1)
    while edges[slot] != NO_EDGE and edges[slot] >> CHILD_BITS != key:
        slot = (slot + 1) & (len(edges) - 1)
    return slot


@compiled
def _insert(edges, letters, ends, ids, roots):
    """Parent, letter, depth and piece (-1: none) of every node; a parent has a smaller number.

    letters  int64, codes of all pieces' letters, one piece after the other
    ends     int64 [N], where each piece ends in them
    ids      int32 [N]
    roots    int32 [N], WORD_START or WORD_INSIDE
    """
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
def _link(edges, parents, letters, pieces, order):
    """Nodes and pops; fills the edges. `order` has the shallow nodes before the deep ones."""
    for node in order:
        _add_edge(edges, parents[node], letters[node], node)
    nodes = np.zeros((len(parents), 3), np.int32)
    nodes[:2, 0] = NOWHERE
    pops = [np.int32(0) for _ in range(0)]  # which tells Numba the type
    for node in order:
        begin = len(pops)
        if pieces[node] >= 0:
            pops.append(pieces[node])
            target = WORD_INSIDE
        else:
            # What the parent emits, and every node on the way from it until one has this letter.
            source = parents[node]
            while True:
                for k in range(nodes[source, 1], nodes[source, 2]):
                    pops.append(pops[k])
                target = nodes[source, 0]
                if target < 0:
                    break
                child = find_child(edges, target, letters[node])
                if child >= 0:
                    target = child
                    break
                source = target
        nodes[node, 0], nodes[node, 1], nodes[node, 2] = target, begin, len(pops)
    return nodes, np.array(pops, np.int32)
