"""Edits of a file of safetensors: its header, the length that it gives, and its data."""

from __future__ import annotations

import json
import struct
from random import Random

from fuzzing import extremes, json_edits


def edited(data: bytes, rng: Random) -> bytes:
    """Returns the file with an edit."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(10)
    if kind <= 5:
        tree = json.loads(header)
        for _ in range(rng.choice([1, 1, 2])):
            tree = json_edits.edit(tree, rng)
        header = json.dumps(tree).encode()
    elif kind == 6:
        return struct.pack("<Q", extremes.integer(rng, length) % 2**64) + data[8:]
    elif kind == 7:
        return data[: rng.randrange(len(data))]
    elif kind == 8:
        body = bytearray(body)
        for _ in range(rng.randint(1, 64)):
            body[rng.randrange(len(body))] = rng.choice([0, 255, 127, 128, rng.randrange(256)])
    else:
        at = 4 * rng.randrange(max(1, len(body) // 4))
        body = body[:at] + struct.pack("<i", extremes.integer(rng) % 2**31) * rng.randint(1, 8) + body[at + 4 :]
    return struct.pack("<Q", len(header)) + header + bytes(body)
