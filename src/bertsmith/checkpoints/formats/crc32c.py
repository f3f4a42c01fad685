"""CRC-32C, the checksum of leveldb's tables and TensorFlow's tensors.

The polynomial is Castagnoli's (RFC 3720, appendix B.4). Sixteen tables take sixteen bytes at a time
("slicing"; Kounavis and Berry 2008, doi 10.1109/TC.2008.85).
"""

from __future__ import annotations

import numpy as np

from bertsmith.base.jit import compiled

POLYNOMIAL = 0x82F63B78  # the lowest bit is the highest power
MASK = 0xA282EAD8  # of `masked_crc32c`: xla/tsl/lib/hash/crc32c.h


def _tables() -> np.ndarray:
    """[16, 256]: the remainder of a byte that 0 to 15 others follow."""
    tables = np.empty((16, 256), np.uint32)
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = (values >> 1) ^ np.where(values & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    tables[0] = values
    for k in range(1, 16):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0][tables[k - 1] & 255]
    return tables


TABLES = _tables()


@compiled
def _remainder(pairs: np.ndarray, rest: np.ndarray, t: np.ndarray) -> np.uint32:
    crc = np.uint64(0xFFFFFFFF)
    byte = np.uint64(255)
    for k in range(len(pairs)):
        a, b = pairs[k, 0] ^ crc, pairs[k, 1]
        x = t[15, a & byte] ^ t[14, (a >> np.uint64(8)) & byte]
        x ^= t[13, (a >> np.uint64(16)) & byte] ^ t[12, (a >> np.uint64(24)) & byte]
        x ^= t[11, (a >> np.uint64(32)) & byte] ^ t[10, (a >> np.uint64(40)) & byte]
        x ^= t[9, (a >> np.uint64(48)) & byte] ^ t[8, a >> np.uint64(56)]
        x ^= t[7, b & byte] ^ t[6, (b >> np.uint64(8)) & byte]
        x ^= t[5, (b >> np.uint64(16)) & byte] ^ t[4, (b >> np.uint64(24)) & byte]
        x ^= t[3, (b >> np.uint64(32)) & byte] ^ t[2, (b >> np.uint64(40)) & byte]
        x ^= t[1, (b >> np.uint64(48)) & byte] ^ t[0, b >> np.uint64(56)]
        crc = np.uint64(x)
    for value in rest:
        crc = (crc >> np.uint64(8)) ^ np.uint64(t[0, (crc ^ np.uint64(value)) & byte])
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


def crc32c(data: bytes | np.ndarray) -> int:
    """The checksum of bytes, or of an array [n] of uint8.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    if not values.flags.writeable or values.ctypes.data % 8:  # Numba would compile it anew
        values = values.copy()
    whole = len(values) // 16 * 16
    pairs = values[:whole].view(np.uint64).reshape(-1, 2)
    return int(_remainder(pairs, values[whole:], TABLES))


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """The checksum as files hold it, turned and shifted: data may hold checksums themselves.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF
