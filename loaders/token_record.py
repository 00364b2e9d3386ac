"""Token records: the unit that a shard stores and a reader verifies, as bytes.

Little-endian, version 1:

    offset  size          field
    0       4             magic "RDGT"
    4       2             format version
    6       2             flags: 1 = tokens are uint32 (else uint16), 2 = has a loss mask
    8       4             crc32 of everything after this field
    12      4             n, number of tokens
    16      4             d, number of document starts
    20      4             vocabulary size: every token is below it
    24      8             index of the first token in the shard (packed corpora: in the concatenation of its rows)
    32      8             position of the first token in its document
    40      2n or 4n      tokens
    ..      4d            document starts inside the record, ascending, uint32
    ..      ceil(n / 8)   loss mask, one bit per token, first token in the high bit; 1: the token counts as a target
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

MAGIC = b"RDGT"
RECORD_VERSION = 1
WIDE, MASKED = 1, 2
_GUARD = struct.Struct("<4sHHI")
_FIELDS = struct.Struct("<IIIQQ")
HEADER_BYTES = _GUARD.size + _FIELDS.size
UINT16_VOCAB = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A decoded record. The arrays are read-only views of its bytes."""

    tokens: np.ndarray
    """uint16 or uint32 [n]."""
    doc_starts: np.ndarray
    """uint32 [d], ascending offsets at which a document begins."""
    loss_mask: np.ndarray | None
    """bool [n], True where the token counts as a target; None: everywhere."""
    first_token: int
    first_position: int
    vocab_size: int


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which tokens below `vocab_size` are stored: uint16 up to 65,536, else uint32."""
    return np.dtype("<u2" if vocab_size <= UINT16_VOCAB else "<u4")


def encode_record(record: TokenRecord) -> bytes:
    """Return the bytes of a record."""
    flags = (WIDE if record.tokens.dtype.itemsize == 4 else 0) | (MASKED if record.loss_mask is not None else 0)
    fields = _FIELDS.pack(len(record.tokens), len(record.doc_starts), record.vocab_size, record.first_token, record.first_position)
    mask = b"" if record.loss_mask is None else np.packbits(record.loss_mask).tobytes()
    body = fields + record.tokens.tobytes() + record.doc_starts.astype("<u4").tobytes() + mask
    return _GUARD.pack(MAGIC, RECORD_VERSION, flags, zlib.crc32(body)) + body


def decode_record(data: bytes) -> TokenRecord:
    """Decode a record and verify its checksum. Raises ValueError with the reason."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"record of {len(data)} bytes is shorter than its header")
    magic, version, flags, crc = _GUARD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not a token record (wrong magic)")
    if version != RECORD_VERSION:
        raise ValueError(f"record format version is {version}, supported is {RECORD_VERSION}")
    if zlib.crc32(memoryview(data)[_GUARD.size :]) != crc:
        raise ValueError("checksum mismatch")
    n, d, vocab_size, first_token, first_position = _FIELDS.unpack_from(data, _GUARD.size)
    width = 4 if flags & WIDE else 2
    if flags & ~(WIDE | MASKED):
        raise ValueError(f"unknown flags {flags:#x}")
    if len(data) != HEADER_BYTES + width * n + 4 * d + (-(-n // 8) if flags & MASKED else 0):
        raise ValueError("length does not match the header")
    tokens = np.frombuffer(data, "<u4" if flags & WIDE else "<u2", n, HEADER_BYTES)
    doc_starts = np.frombuffer(data, "<u4", d, HEADER_BYTES + width * n)
    mask = None
    if flags & MASKED:
        bits = np.frombuffer(data, np.uint8, -1, HEADER_BYTES + width * n + 4 * d)
        mask = np.unpackbits(bits, count=n).view(bool)
    return TokenRecord(tokens, doc_starts, mask, first_token, first_position, vocab_size)


def edge_crc32(first: bytes, last: bytes) -> int:
    """Return the crc32 over the first and the last record of a shard."""
    return zlib.crc32(last, zlib.crc32(first))
