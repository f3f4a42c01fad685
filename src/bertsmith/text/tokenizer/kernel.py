"""The tokenizer's inner loop, compiled: code points of many texts in, flat arrays of pieces out.

Legend: C code points, N texts, S symbols of a block, R pieces that the result can hold.

`_spell` turns code points into symbols: normalized letters, and ends of words. `_match` looks up
words that are pieces and walks the trie along the letters of the others. They take turns, a block
of text at a time, so that the symbols stay in the processor's cache. A block ends with a *unit*,
text that no rule looks out of: white space or an ideograph ends one. At a unit that needs the
reference code, a page of the table or larger arrays the loop returns to Python, which provides that
and calls again. Arrays are handed over by the block or the word, never by the character: every call
counts references to each.
"""

from __future__ import annotations

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.text.tokenizer.tables import (
    CHILD,
    CHILD_BITS,
    CLASS_SHIFT,
    CODE_BITS,
    DROPPED,
    EXPANSION,
    IDEOGRAPH,
    KIND_SHIFT,
    LATIN,
    LATIN_EXPANSION,
    MARK,
    MOST_CHARACTERS,
    NO_EDGE,
    RARE,
    REFERENCE,
    UNFAMILIAR,
    VALUE,
    WHITE_SPACE,
    WORD_BY_ITSELF,
    WORD_INSIDE,
    WORD_START,
    find_word,
    first_slot,
)
from bertsmith.text.tokenizer.wordpiece import MAX_WORD

DONE, NEEDS_PAGES, NEEDS_REFERENCE, NEEDS_SYMBOLS, NEEDS_PIECES = range(5)  # why it returned
TEXT, POSITION, PIECES, WORDS, UNIT_END = range(5)  # of `state`


@compiled
def encode(codes, starts, tables, limit, block, result, boundaries, state):
    """Encode from `state` to the end, or to the first unit that needs help.

    codes       uint32 [C], the texts, a white space after each
    starts      int64 [N + 1], where each text begins in `codes`, and C
    tables      entries, expansions of the `CharacterTable`; the fields of the `Trie`
    limit       pieces of a text after which the rest of it is skipped
    block       int32 [S] and [S], for symbols and where in `codes` they come from
    result      ids int32 [R], offsets int32 [R, 2], word_ids int32 [R]; the last two may be empty
    boundaries  int64 [N + 1], pieces before each text
    state       int64 [5]: text, code point, pieces, words of the text so far; end of the unit

    Returns DONE, or what the unit at `state` needs.
    """
    entries, expansions, trie = tables[0], tables[1], tables[2:]
    while True:
        need, size, position = _spell(codes, entries, expansions, block, state)
        if state[PIECES] + size > len(result[0]):
            return NEEDS_PIECES
        state[POSITION] = position
        if size > 0:
            _match(block, size, starts, trie, limit, result, boundaries, state)
        skipped = state[POSITION] > position
        full = need == NEEDS_SYMBOLS and size > 0
        if not skipped and not full:
            return need


@compiled
def _spell(codes, entries, expansions, block, state):
    """Turn code points into symbols, as many whole units as the block can hold.

    Returns what the unit after them needs, the number of symbols, the position of that unit.
    """
    symbols, origins = block
    last = len(symbols) - MOST_CHARACTERS
    i = unit = state[POSITION]
    size, unit_size = 0, 0
    combining_class, after_latin = np.int64(0), False
    while i < len(codes) and size <= last:
        entry = np.int64(entries[codes[i]])
        if entry > UNFAMILIAR or RARE < entry < UNFAMILIAR:  # nearly always
            symbols[size], origins[size] = entry, i
            size, i = size + 1, i + 1
            combining_class, after_latin = np.int64(0), False
            ends = (entry == WHITE_SPACE) | (entry <= IDEOGRAPH)  # without a branch
            unit, unit_size = (i if ends else unit), (size if ends else unit_size)
            continue
        kind, value = entry >> KIND_SHIFT & 7, entry & VALUE
        if entry != UNFAMILIAR and kind == DROPPED:
            i += 1
            continue
        before, combining_class = combining_class, entry >> CLASS_SHIFT & 255
        if entry == UNFAMILIAR or kind == REFERENCE or 0 < combining_class < before:
            state[UNIT_END] = _unit_end(codes, entries, i)
            return NEEDS_PAGES if state[UNIT_END] < 0 else NEEDS_REFERENCE, unit_size, unit
        if kind in (EXPANSION, LATIN_EXPANSION):
            for k in range(value + 1, value + 1 + expansions[value]):
                symbols[size], origins[size] = expansions[k], i
                size += 1
        elif kind != MARK or not after_latin:
            symbols[size], origins[size] = value, i
            size += 1
        if kind != MARK:
            after_latin = kind in (LATIN, LATIN_EXPANSION)
        i += 1
    return NEEDS_SYMBOLS if i < len(codes) else DONE, unit_size, unit


@compiled
def _unit_end(codes, entries, i):
    """The end of the unit around code point i; -1 if an entry is missing."""
    while True:
        entry = entries[codes[i]]
        if entry == UNFAMILIAR:
            return -1
        if entry == WHITE_SPACE or RARE < entry <= IDEOGRAPH:
            return i
        i += 1


@compiled
def _match(block, num_symbols, starts, trie, limit, result, boundaries, state):
    """Append the pieces of a block of symbols to the result."""
    symbols, origins = block
    edges, nodes, pops, lengths, unknown, numbers, pieces = trie
    ids, offsets, word_ids = result
    located = len(offsets) > 0
    text, count, words = state[TEXT], state[PIECES], state[WORDS]
    begin, end, most = starts[text], starts[text + 1] - 1, boundaries[text] + limit
    s = 0
    while s < num_symbols:
        if symbols[s] > 0:
            first = count
            piece, word_end = find_word(symbols, s, numbers, pieces)
            if piece >= 0:
                ids[count], count = piece, count + 1
            else:
                count = _walk(symbols, s, word_end, edges, nodes, pops, ids, count)
                if count < 0:
                    ids[first], count = unknown, first + 1
            if located:
                character = s
                for k in range(first, count - 1):
                    offsets[k, 0], word_ids[k] = origins[character] - begin, words
                    character += lengths[ids[k]]
                    offsets[k, 1] = origins[character - 1] + 1 - begin
                offsets[count - 1, 0], word_ids[count - 1] = origins[character] - begin, words
                offsets[count - 1, 1] = origins[word_end - 1] + 1 - begin  # also of [UNK]
            words, s = words + 1, word_end
        symbol = np.int64(symbols[s])
        if symbol != WHITE_SPACE:
            ids[count] = WORD_BY_ITSELF - symbol & VALUE
            if located:
                start = origins[s] - begin
                offsets[count, 0], offsets[count, 1], word_ids[count] = start, start + 1, words
            count, words = count + 1, words + 1
        elif origins[s] == end:
            text, words, count = text + 1, 0, min(count, most)
            boundaries[text] = count
            if text < len(starts) - 1:
                begin, end, most = starts[text], starts[text + 1] - 1, count + limit
        s += 1
    state[TEXT], state[PIECES], state[WORDS] = text, count, words
    if text < len(starts) - 1 and count >= most:
        state[POSITION] = end  # enough of this text


@compiled
def _walk(symbols, start, end, edges, nodes, pops, ids, count):
    """Append the pieces of symbols[start:end], a word, to the ids; their new number.

    It is -1 for [UNK], when some may have been written after the first `count`.
    """
    if end - start > MAX_WORD:
        return np.int64(-1)
    node, mask, k = np.int64(WORD_START), len(edges) - 1, start
    while k < end or node > WORD_INSIDE:
        edge = np.int64(NO_EDGE)
        if k < end:
            key = node << CODE_BITS | np.int64(symbols[k])
            slot = first_slot(key) & mask
            edge = edges[slot]
            while edge >> CHILD_BITS != key and edge != NO_EDGE:
                slot = (slot + 1) & mask
                edge = edges[slot]
        if edge != NO_EDGE:
            node, k = edge & CHILD, k + 1
            continue
        for pop in range(nodes[node, 1], nodes[node, 2]):
            ids[count] = pops[pop]
            count += 1
        node = np.int64(nodes[node, 0])
        if node < 0:
            return np.int64(-1)
    return count if node == WORD_INSIDE else np.int64(-1)
