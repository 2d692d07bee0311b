"""Frames: the one byte layout of stored blocks, in segment files, in Redis and in exported sessions.

A frame is a header (magic, type, key, payload length, checksum over all of it) and a payload: safetensors for a block,
an encoded record, or nothing. Frames verify themselves, so a file of them can be read back without any index.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
from torch import Tensor

from dlite_agent.session.record import Refused

MAGIC = b"DLf1"
BLOCK, RECORD, REMOVED = 1, 2, 3
_HEAD = struct.Struct("<4sB16sQ16s")
HEADER = _HEAD.size
NO_KEY = "0" * 32


@dataclass(frozen=True)
class Frame:
    """A verified frame that fills data[offset:offset + length]."""

    type: int
    key: str
    offset: int
    length: int
    payload: bytes


def pack(type: int, key: str, payload: bytes) -> bytes:
    """A frame of a payload under a key of 32 hex digits."""
    name = bytes.fromhex(key)
    return _HEAD.pack(MAGIC, type, name, len(payload), _checksum(type, name, payload)) + payload


def pack_tensors(key: str, tensors: Mapping[str, Tensor]) -> bytes:
    """A block frame of tensors, made contiguous on the host."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    return pack(BLOCK, key, safetensors.torch.save(plain))


def unpack(data: bytes | mmap.mmap, offset: int = 0) -> Frame | None:
    """The frame at an offset, or None where there is no whole and undamaged one."""
    if len(data) - offset < HEADER:
        return None
    magic, type, name, length, checksum = _HEAD.unpack_from(data, offset)
    end = offset + HEADER + length
    if magic != MAGIC or end > len(data):
        return None
    payload = data[offset + HEADER : end]
    if _checksum(type, name, payload) != checksum:
        return None
    return Frame(type, name.hex(), offset, HEADER + length, payload)


def unpack_tensors(data: bytes, key: str) -> dict[str, Tensor]:
    """Tensors of the block stored under a key.

    Raises:
        Refused: the frame is damaged, or was planted under a key that is not its own.
    """
    frame = unpack(data)
    if frame is None or frame.length != len(data):
        raise Refused("A stored block does not match its checksum.", param="block")
    if frame.type != BLOCK or frame.key != key:
        raise Refused("The block stored under this key is another one.", param="key")
    try:
        return safetensors.torch.load(frame.payload)
    except safetensors.SafetensorError as error:
        raise Refused(f"A stored block cannot be read: {error}", param="block") from error


def scan(data: bytes | mmap.mmap, offset: int = 0) -> Iterator[Frame]:
    """All undamaged frames from an offset on, in order; what lies between them is skipped."""
    while (offset := data.find(MAGIC, offset)) >= 0:
        frame = unpack(data, offset)
        if frame is None:
            offset += 1
        else:
            yield frame
            offset += frame.length


def _checksum(type: int, name: bytes, payload: bytes) -> bytes:
    digest = hashlib.sha256(bytes((type,)) + name + len(payload).to_bytes(8, "little"))
    digest.update(payload)
    return digest.digest()[:16]
