"""Damage done to a file at random, the same for the same seed: any binary format."""

import random
from collections.abc import Iterator
from pathlib import Path

# What a count, a size or an offset is replaced by, beside what lies around its own value.
EXTREMES = (
    0, 1, 2, 3, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 2**31 - 1, 2**31,
    2**32 - 2, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1,
)  # fmt: skip
BYTES = b"\0\x01\x02\x7f\x80\xff '\"(){}[],:.-+0123456789aLO<>|/\\\n"


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged copies of `data`, each different from it; some have up to three wounds."""
    rng = random.Random(seed)
    for _ in range(count):
        damaged = data
        while damaged == data:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                damaged = rng.choice(KINDS)(damaged or b"\0", rng)
        yield damaged


def rewrite(path: Path, content: bytes) -> None:
    """Writes a file again in place: to create or to empty one takes far longer."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(content)
        file.truncate()


def place(data: bytes, rng: random.Random) -> int:
    """Anywhere, the ends more often than the middle: that is where the headers are."""
    kind, size = rng.randrange(4), len(data)
    if kind == 0:
        return rng.randrange(min(size, 256))
    if kind == 1:
        return size - 1 - rng.randrange(min(size, 256))
    return rng.randrange(size)


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    at = place(data, rng)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def set_byte(data: bytes, rng: random.Random) -> bytes:
    at = place(data, rng)
    return data[:at] + bytes([rng.choice(BYTES)]) + data[at + 1 :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: place(data, rng)]


def remove(data: bytes, rng: random.Random) -> bytes:
    at = place(data, rng)
    return data[:at] + data[at + rng.choice((1, 2, 4, 8, rng.randrange(1, 80))) :]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A piece of the file once more, put in or laid over what is there."""
    source, at = place(data, rng), place(data, rng)
    piece = data[source : source + rng.randrange(1, 120)]
    return data[:at] + piece + data[at + rng.choice((0, len(piece))) :]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = place(data, rng)
    return data[:at] + rng.choice((b"\0", b"(", b"0", b"\xff\xff", bytes(8), b"PK")) + data[at:]


def zero_run(data: bytes, rng: random.Random) -> bytes:
    at = place(data, rng)
    end = min(at + rng.choice((2, 4, 8, 64, 512)), len(data))
    return data[:at] + bytes(end - at) + data[end:]


def set_integer(data: bytes, rng: random.Random) -> bytes:
    """1, 2, 4 or 8 bytes replaced by an extreme value or by a neighbour of what they hold."""
    width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "little", "big"))
    at = place(data, rng)
    if rng.random() < 0.5:
        at -= at % width
    old = int.from_bytes(data[at : at + width], order)
    near = (old + 1, old - 1, old * 2, old // 2, -old)
    value = rng.choice((rng.choice(EXTREMES), rng.choice(near))) % 256**width
    return data[:at] + value.to_bytes(width, order) + data[at + width :]


KINDS = (flip_bit, set_byte, truncate, remove, splice, insert, zero_run, set_integer, set_integer)
