"""Objects <-> frames: `dumps` makes `[pickle, buffer, ...]` of any value, `loads` makes the value of them.

    frames = dumps({"weights": tensor, "rows": array, "f": lambda x: x + 1})     # copies what is large, once
    value = loads(frames)                                                        # copies nothing that it may keep

Functions and classes that the other side cannot import go by value (cloudpickle). Arrays and CPU tensors of
`OUT_OF_BAND_BYTES` and more go out of band, never through the pickle; of a tensor's storage only the bytes that the
message's tensors use. Tensors that share a storage within one message share it after `loads` too.

The first frame is a pickle. Which bytes of a storage are used is known only when the whole value has been pickled, so
a message with tensors has a table behind the pickle: `[pickle][table][length of the table][T]`. It says where each
storage's bytes begin, and holds the bytes of the small ones. A pickle alone ends with a full stop, never with a T.

torch is not imported here: the side that sends a tensor has it, the side that loads one needs it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import struct
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle

from gpulayer.errors import GPUlayerError
from gpulayer.wire.message import Buffer
from gpulayer.wire.unpicklable import DeviceTensorError, explain_unpicklable

OUT_OF_BAND_BYTES = 8 * 1024
"""Buffers of this size and more get a frame of their own."""

_PROTOCOL = 5
_PLAIN_ITEMS = 64  # a value with more items than this costs more to look through than cloudpickle costs
_HUGE_PAGE_COPY_BYTES = 4 * 1024 * 1024  # from here on numpy's memory, which asks for huge pages, is twice as fast
_BASE_BYTES = 16  # a storage is cut at multiples of the largest item, so that offsets stay whole items
_ALIGN_BYTES = 8  # what the memory of a frame must be a multiple of, to be used without a copy
_PLAIN_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
_SCALARS = frozenset({type(None), bool, int, float, str})
_TABLE_END = struct.Struct("<Qc")


def dumps(value: Any) -> list[Buffer]:
    """The frames of `value`: its pickle, then the buffers, each a read-only copy of what the value held now.

    Raises `SerializationError`, which names the variable, for what cannot be pickled or sits in a GPU's memory.
    """
    try:
        return [pickle.dumps(value, _PROTOCOL)] if _is_plain(value) else _frames(value)
    except (GPUlayerError, MemoryError):
        raise
    except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
        raise explain_unpicklable(value, error, _try_pickling) from error


def loads(frames: Sequence[Buffer]) -> Any:
    """The inverse of `dumps`. The value keeps and writes to frames that are writable and aligned, and copies the others.

    A module that is missing here raises `ModuleNotFoundError`. Frames must come from an authenticated peer.
    """
    head = frames[0]
    if head[-1] != ord("."):
        return pickle.loads(head, buffers=_opened_buffers(head, frames))  # noqa: S301 - peers are authenticated first
    return pickle.loads(head, buffers=map(_writable, frames[1:]))  # noqa: S301 - peers are authenticated first


def _try_pickling(value: Any) -> None:
    _Pickler(types.SimpleNamespace(write=len), _Buffers(keep=False)).dump(value)


def _is_plain(value: Any) -> bool:
    """Whether `value` is a few builtin scalars in builtin containers, for which plain pickle does and is fastest."""
    pending = [value]
    for item in pending:
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is bytes:
            if len(item) >= OUT_OF_BAND_BYTES:
                return False
        elif kind in (tuple, list, dict):
            if len(item) + len(pending) > _PLAIN_ITEMS:
                return False
            pending.extend(item)
            if kind is dict:
                pending.extend(item.values())
        else:
            return False
    return True


# -- sending -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _StorageUse:
    """One storage in a message, and which of its bytes the message's tensors use."""

    storage: Any
    marker: pickle.PickleBuffer = field(default_factory=lambda: pickle.PickleBuffer(bytearray()))  # its place in the pickle
    low: int = 0
    high: int = 0
    align: int = _ALIGN_BYTES
    users: list[Any] = field(default_factory=list[Any])

    def cover(self, low: int, high: int, item_bytes: int, user: Any) -> None:
        """Add the bytes from `low` to `high`, of items of `item_bytes`."""
        if high > (held := self.storage.nbytes()):  # FSDP and others free storages under living tensors; reading on would crash
            raise ValueError(f"a tensor needs {high} bytes of a storage that has been freed or cut to {held} bytes")
        self.low, self.high = (min(low, self.low), max(high, self.high)) if self.high else (low, high)
        self.align = max(self.align, item_bytes)
        self.users.append(user)

    def cut(self) -> tuple[int, bool, memoryview]:
        """(base, dense, bytes): a copy of the used bytes and where they begin, or of one sparse view's items alone."""
        base = self.low - self.low % _BASE_BYTES
        size = self.high - base
        if len(self.users) == 1 and size >= OUT_OF_BAND_BYTES:
            user = self.users[0]
            dense_bytes = user.numel() * user.element_size() if user is not self.storage else size
            if 2 * dense_bytes <= size:  # a column of a matrix, or every tenth row
                plain = getattr(sys.modules["torch"], _PLAIN_DTYPES[user.element_size()])  # some dtypes cannot be copied
                items = user.detach().view(plain).contiguous()
                return 0, True, _copy(_memory(items.data_ptr(), dense_bytes))
        return base, False, _copy(_memory(self.storage.data_ptr() + base, size))


class _Buffers:
    """The out-of-band parts of one message, in the order in which its pickle asks for them."""

    def __init__(self, keep: bool = True) -> None:
        self.parts: list[memoryview | _StorageUse] = []
        self._keep = keep
        self._by_storage: dict[int, _StorageUse] = {}
        self._by_marker: dict[int, _StorageUse] = {}

    def use(self, storage: Any) -> _StorageUse:
        """The record of a torch storage, which must be in this host's memory."""
        if storage.device.type != "cpu":
            raise DeviceTensorError(str(storage.device))
        use = self._by_storage.get(storage._cdata)  # the address of the storage itself, not of one Python view of it
        if use is None:
            use = self._by_storage[storage._cdata] = _StorageUse(storage)
            self._by_marker[id(use.marker)] = use
        return use

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's buffer callback: copy a buffer, or return True to leave it in the pickle."""
        use = self._by_marker.get(id(buffer))
        view = buffer.raw()
        if use is None and view.nbytes < OUT_OF_BAND_BYTES:
            return True
        if self._keep:
            self.parts.append(use or _copy(view))
        return False


def _reduce_code(code: types.CodeType) -> Any:
    """cloudpickle's way, but with the file's name, which it leaves out: a remote traceback shows where the code stands."""
    make, args, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in args), *rest


_DISPATCH: Any = ChainMap({types.CodeType: _reduce_code}, *vars(cloudpickle.Pickler)["dispatch_table"].maps)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with CPU tensors and every kind of array out of band."""

    dispatch_table = _DISPATCH

    def __init__(self, file: Any, buffers: _Buffers) -> None:
        # the callback belongs to `buffers`: one of self's would be a cycle that keeps the message until the next gc
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=buffers.take)
        self._buffers = buffers
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._tensor = getattr(torch, "Tensor", None)
        self._untyped, self._typed = getattr(torch, "UntypedStorage", None), getattr(torch, "TypedStorage", None)
        self._array = getattr(numpy, "ndarray", None)

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle `obj`; called for everything that is not of a builtin type."""
        kind = type(obj)
        if kind is self._tensor:
            return self._reduce_tensor(obj)
        if kind is _StorageUse:
            return _open_storage, (obj.marker,)
        if kind is self._array:
            return _reduce_array(obj)
        if kind is self._untyped or kind is self._typed:
            return self._reduce_storage(obj)
        # pickle's own way is faster than cloudpickle's for the functions that every message with a tensor names
        return NotImplemented if kind is types.FunctionType and obj in _BY_REFERENCE else super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        device = tensor.device.type
        strided = tensor.layout is sys.modules["torch"].strided and not (tensor.is_quantized or tensor.is_nested)
        if device == "meta" or (device == "cpu" and (not strided or tensor.is_conj() or tensor.is_neg())):
            return NotImplemented  # torch's own way; its inner tensors and storages come back to this class
        if device != "cpu":
            raise DeviceTensorError(str(tensor.device))
        sys.modules["torch"].utils.hooks.warn_if_has_hooks(tensor)
        use, size, stride, offset = self._buffers.use(tensor.untyped_storage()), tuple(tensor.shape), tensor.stride(), None
        if tensor.numel():  # one without items uses no bytes, wherever it points
            offset, item_bytes = tensor.storage_offset(), tensor.element_size()
            last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            use.cover(offset * item_bytes, (last + 1) * item_bytes, item_bytes, tensor)
        args = (use, _dtype_name(tensor.dtype), size, stride, offset, tensor.requires_grad)
        attributes = tensor.__dict__
        return (_rebuild_tensor, args, attributes, None, None, _set_attributes) if attributes else (_rebuild_tensor, args)

    def _reduce_storage(self, storage: Any) -> Any:
        untyped = getattr(storage, "_untyped_storage", storage)
        use, size = self._buffers.use(untyped), untyped.nbytes()
        if size:
            use.cover(0, size, _BASE_BYTES, use.storage)
        return _rebuild_storage, (use, None if untyped is storage else _dtype_name(storage.dtype))


def _reduce_array(array: Any) -> Any:
    """numpy's own way, except that a read-only or scattered array goes as a writable, dense one."""
    if array.dtype.hasobject or (array.flags.forc and array.flags.writeable):
        return NotImplemented
    return array.copy(order="A").__reduce_ex__(_PROTOCOL)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _frames(value: Any) -> list[Buffer]:
    file, buffers, frames, rows = io.BytesIO(), _Buffers(), list[Buffer](), dict[int, _Row]()
    _Pickler(file, buffers).dump(value)
    for index, part in enumerate(buffers.parts):
        data = part
        if isinstance(part, _StorageUse):
            base, dense, data = part.cut()
            small = data.nbytes < OUT_OF_BAND_BYTES
            rows[index] = _Row(base, dense, part.align, bytes(data) if small else None)
            if small:
                continue
        frames.append(data.toreadonly())  # pyright: ignore[reportAttributeAccessIssue]
    if rows:
        table = pickle.dumps({index: tuple(row) for index, row in rows.items()}, _PROTOCOL)
        file.write(table + _TABLE_END.pack(len(table), b"T"))
    return [file.getvalue(), *frames]


# -- receiving ---------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """What the table says of one storage."""

    base: int  # where its bytes began, in bytes
    dense: bool  # the items of one tensor, one after the other, whatever its strides were
    align: int  # bytes
    data: Buffer | None  # None: it has a frame


def _opened_buffers(head: Buffer, frames: Sequence[Buffer]) -> Iterator[memoryview | _Row]:
    """What the pickle asks for, in its order: arrays' memory, and storages with their rows."""
    size, _ = _TABLE_END.unpack(head[-_TABLE_END.size :])
    table = memoryview(head)[-_TABLE_END.size - size : -_TABLE_END.size]
    rows: dict[int, Any] = pickle.loads(table)  # noqa: S301 - peers are authenticated first
    position = 1
    for index in range(len(frames) + len(rows)):
        row = _Row(*rows[index]) if index in rows else None
        if row is not None and row.data is not None:
            yield row._replace(data=_writable(row.data))
        elif position < len(frames):
            data = _writable(frames[position], row.align if row else _ALIGN_BYTES)
            position += 1
            yield row._replace(data=data) if row else data


def _writable(frame: Buffer, align: int = _ALIGN_BYTES) -> memoryview:
    """The frame's memory if it may be written and is aligned, else a copy of it."""
    view = memoryview(frame)
    if view.readonly or not view.nbytes or ctypes.addressof(ctypes.c_char.from_buffer(view)) % align:
        return _copy(view)
    return view


def _open_storage(row: _Row) -> tuple[Any, _Row]:
    import torch

    assert row.data is not None
    if not len(row.data):  # frombuffer refuses those
        return torch.UntypedStorage(0), row
    return torch.frombuffer(row.data, dtype=torch.uint8).untyped_storage(), row


def _rebuild_tensor(
    opened: tuple[Any, _Row], dtype: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None, requires_grad: bool
) -> Any:
    import torch

    tensor: Any = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")  # also under a default device
    storage, row = opened
    first = 0 if offset is None or row.dense else offset - row.base // tensor.element_size()
    tensor.set_(storage, first, size, () if row.dense else stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_storage(opened: tuple[Any, _Row], dtype: str | None) -> Any:
    import torch

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=opened[0], dtype=getattr(torch, dtype), _internal=True) if dtype else opened[0]


def _set_attributes(target: Any, attributes: dict[str, Any]) -> None:
    target.__dict__.update(attributes)


_BY_REFERENCE: frozenset[Callable[..., Any]] = frozenset({_open_storage, _rebuild_tensor, _rebuild_storage, _set_attributes})
_VIEW_MEMORY = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory: Any = _VIEW_MEMORY(("PyMemoryView_FromMemory", ctypes.pythonapi))


def _memory(address: int, size: int) -> memoryview:
    """`size` bytes at `address`, read-only; the caller keeps their owner alive."""
    return _view_memory(address, size, 0x100) if size else memoryview(b"")  # 0x100 is PyBUF_READ


def _copy(view: memoryview) -> memoryview:
    numpy = sys.modules.get("numpy")
    if view.nbytes < _HUGE_PAGE_COPY_BYTES or numpy is None:
        return memoryview(bytearray(view))
    memory = numpy.empty(view.nbytes, "u1")
    memory[:] = numpy.frombuffer(view, "u1")
    return memory.data
