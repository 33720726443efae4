"""Metadata and tensor table of a GGUF file, read in place.

The `gguf` package's reader makes several numpy views for every token of the vocabulary, which takes seconds
for 150 thousand tokens; here an array is skipped, and read only when somebody asks for it. Format:
ggml/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specproxy.errors import ModelFileError

__all__ = ["GgufFile", "TensorInfo"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_DEPTH = 4  # arrays in arrays
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: shape in ggml's order (fastest first), type name, offset in the data, size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


class _Damaged(Exception):
    """The bytes do not make sense at this place."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that has been skipped: where its elements begin."""

    at: int
    kind: int
    count: int


class GgufFile:
    """An open GGUF file (a context manager). Scalars are read at once, arrays on demand.

    Raises (on opening):
        ModelFileError: missing, a directory, unreadable, not GGUF, of an unsupported version, damaged or
        truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        try:
            self._open()
        except (struct.error, _Damaged, IndexError, OverflowError, UnicodeDecodeError) as error:
            self.close()
            what = "it ends too early" if isinstance(error, struct.error | IndexError) else error
            raise ModelFileError(
                f"{path} is damaged or cut short: {what}", hint="download it again and compare the size"
            ) from error
        except ModelFileError:
            self.close()
            raise

    def _open(self) -> None:
        data = self._bytes
        if data[:4] != MAGIC:
            what = "an empty file" if not len(data) else f"it begins with {bytes(data[:4])!r}"
            raise ModelFileError(
                f"{self.path} is not a GGUF file: {what}", hint="convert the model to GGUF first"
            )
        version, tensors, fields = struct.unpack_from("<IQQ", data, 4)
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            reason = "is big-endian" if swapped else f"has GGUF version {version}, not 2 or 3"
            raise ModelFileError(
                f"{self.path} {reason}", hint="convert the model again with a current converter"
            )
        self._at = 24
        self._fields: dict[str, Any] = {}
        for _ in self._counted(fields, 13):  # an empty key, a type and one byte
            key = self._string()
            (kind,) = self._unpack("I")
            self._fields[key] = self._value(kind, 0)
        self.tensors = {info.name: info for info in self._tensor_table(tensors)}
        alignment = self._fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _Damaged(f"alignment {alignment}")
        self.data_at = -(-self._at // alignment) * alignment
        end = max((self.data_at + t.offset + t.nbytes for t in self.tensors.values()), default=0)
        if end > len(data):
            raise _Damaged(f"{len(data)} bytes, where its tensors need {end}")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; idempotent."""
        self._bytes.close()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self._bytes)

    def raw(self, start: int, end: int) -> bytes:
        """Bytes of the file."""
        return self._bytes[start:end]

    @property
    def scalars(self) -> Mapping[str, Any]:
        """All fields that are not arrays."""
        return {key: value for key, value in self._fields.items() if not isinstance(value, _Array)}

    def length(self, key: str) -> int | None:
        """Number of elements of an array field, or None."""
        value = self._fields.get(key)
        return value.count if isinstance(value, _Array) else None

    def numbers(self, key: str) -> tuple[Any, ...] | None:
        """An array of numbers or booleans, or None."""
        value = self._fields.get(key)
        if not isinstance(value, _Array) or value.kind not in SCALARS:
            return None
        return struct.unpack_from(f"<{value.count}{SCALARS[value.kind]}", self._bytes, value.at)

    def strings(self, key: str) -> list[bytes] | None:
        """An array of strings, or None."""
        value = self._fields.get(key)
        if not isinstance(value, _Array) or value.kind != STRING:
            return None
        data, at, unpack = self._bytes, value.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(value.count):
            (length,) = unpack(data, at)
            at += 8
            found.append(data[at : at + length])
            at += length
        return found

    # --- reading forward ---

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._bytes, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _counted(self, count: int, least_bytes: int) -> Iterator[int]:
        """A range of `count`, which must be able to fit into the rest of the file."""
        if count * least_bytes > len(self._bytes) - self._at:
            raise _Damaged(f"{count} entries announced at byte {self._at}")
        return iter(range(count))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if length > len(self._bytes) - self._at:
            raise _Damaged(f"a text of {length} bytes announced at byte {self._at}")
        text = self._bytes[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in SCALARS:
            return self._unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind == ARRAY and depth < MAX_DEPTH:
            return self._skip_array(depth)
        raise _Damaged(f"value type {kind} at byte {self._at}")

    def _skip_array(self, depth: int) -> _Array:
        kind, count = self._unpack("IQ")
        array = _Array(self._at, kind, count)
        if kind in SCALARS:
            width = struct.calcsize("<" + SCALARS[kind])
            self._counted(count, width)
            self._at += count * width
        elif kind == STRING:
            self._skip_strings(count)
        else:
            for _ in self._counted(count, 12):
                self._value(kind, depth + 1)
        return array

    def _skip_strings(self, count: int) -> None:
        self._counted(count, 8)
        data, at, unpack = self._bytes, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise _Damaged(f"a list of {count} texts runs beyond the end")
        self._at = at

    def _tensor_table(self, count: int) -> Iterator[TensorInfo]:
        for _ in self._counted(count, 24):
            name = self._string()
            (dims,) = self._unpack("I")
            if dims > MAX_DIMS:
                raise _Damaged(f"tensor {name!r} with {dims} dimensions")
            shape = self._unpack(f"{dims}Q")
            kind, offset = self._unpack("IQ")
            yield _tensor(name, shape, kind, offset)


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    elements = 1
    for dim in shape:
        elements *= dim
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:  # newer than the gguf package: its size is not known, and not checked
        return TensorInfo(name, shape, f"type {kind}", offset, 0)
    block, block_bytes = GGML_QUANT_SIZES[known]
    return TensorInfo(name, shape, known.name, offset, elements // block * block_bytes)


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, mapped.

    Raises:
        ModelFileError: it cannot be opened, or is empty.
    """
    hint = "give the path of a .gguf file"
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file", hint=hint) from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a directory", hint=hint) from None
    except ValueError:
        raise ModelFileError(f"{path} is not a GGUF file: it is empty", hint=hint) from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
