"""Index files made by hand, so that a test can say anything in them."""

import pyarrow as pa

from bertsmith.checkpoints.formats.crc32c import masked_crc32c
from bertsmith.checkpoints.formats.tensorflow_table import varint

MAGIC = bytes.fromhex("57fb808b247547db")  # TensorFlow's own files end so
FLOAT = 1


def checked(content, kind=0):
    """A block with its compression and checksum."""
    body = content + bytes([kind])
    return body + masked_crc32c(body).to_bytes(4, "little")


def packed(content):
    """A block as snappy's own library packs it."""
    return checked(pa.compress(content, codec="snappy", asbytes=True), 1)


def block(items, starts=(0,)):
    """Entries (key, value), or (shared, own part of the key, value), and where they may start."""
    out = b""
    for item in items:
        shared, key, value = item if len(item) == 3 else (0, *item)
        out += varint(shared) + varint(len(key)) + varint(len(value)) + key + value
    numbers = [*starts, len(starts)]
    return out + b"".join(number.to_bytes(4, "little") for number in numbers)


def place(offset, content):
    """Where a block is, without its last five bytes."""
    return varint(offset) + varint(len(content) - 5)


def table(*blocks, index=None):
    """A table of blocks that `checked` or `packed` made."""
    data, places = b"", []
    for number, one in enumerate(blocks):
        places.append((b"%05d" % number, place(len(data), one)))
        data += one
    filters = checked(block([]))
    index = index or checked(block(places))
    footer = place(len(data), filters) + place(len(data) + len(filters), index)
    return data + filters + index + footer.ljust(40, b"\0") + MAGIC


def message(**fields):
    """A message of protocol buffers: f1=5 a number, f2=b"..." a message, f6=... four bytes."""
    out = b""
    for name, values in fields.items():
        number = int(name[1:])
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, bytes):
                out += varint(number << 3 | 2) + varint(len(value)) + value
            elif number == 6:
                out += varint(number << 3 | 5) + value.to_bytes(4, "little")
            else:
                out += varint(number << 3) + varint(value % 2**64)
    return out


def shape(*sizes):
    return message(f2=[message(f1=size) for size in sizes])


def entry(sizes, offset, data, dtype=FLOAT, **other):
    """The entry of a tensor of these bytes; `size` and other fields (f3 the shard) may lie."""
    size = other.pop("size", len(data))
    return message(f1=dtype, f2=shape(*sizes), f4=offset, f5=size, f6=masked_crc32c(data), **other)


HEADER = message(f1=1, f3=message(f1=1))


def write_crafted(prefix, items, data, header=HEADER):
    """A checkpoint of one shard: {key: entry} as they are given, and the shard's bytes."""
    index = table(checked(block([(b"", header), *items])))
    prefix.with_name(prefix.name + ".index").write_bytes(index)
    prefix.with_name(prefix.name + ".data-00000-of-00001").write_bytes(data)
    return prefix
