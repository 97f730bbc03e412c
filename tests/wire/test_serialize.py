"""Objects <-> frames: what arrives equals what was sent, out of band, unshared with the sender, or an error that helps."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import subprocess
import sys
import threading
import types
import weakref
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from torch import nn

from gpulayer.errors import NotConnectedError, SerializationError
from gpulayer.wire.serialize import OUT_OF_BAND_BYTES, dumps, loads
from gpulayer.wire.unpicklable import explain_unpicklable

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}, key=str)
VIEWS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "row": lambda t: t[3],
    "column": lambda t: t[:, 3],
    "block": lambda t: t[2:40, 5:17],
    "steps": lambda t: t[::7, ::5],
    "scalar": lambda t: t[5, 5],
    "empty": lambda t: t[60:, :0],
    "expanded": lambda t: t[1].expand(9, -1),
    "windows": lambda t: t[0].unfold(0, 5, 2),
}


def round_trip(value):
    return loads(dumps(value))


def error_of(value):
    with pytest.raises(SerializationError) as caught:
        dumps(value)
    return caught.value


def raw(tensor: torch.Tensor) -> bytes:
    """The items' bytes, in order: what equality must mean for NaNs and for types that have no `==`."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return whole.detach().view(as_int[whole.element_size()]).contiguous().numpy().tobytes()


def in_main(source: str, **names):
    """The namespace after running `source` as the user's script, whose functions and classes go by value."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    return types.SimpleNamespace(**namespace)


def writable(frames):
    """The frames as a transport delivers them: fresh memory of the receiver's own."""
    return [bytearray(frame) for frame in frames]


def shifted(frames):
    """The frames at odd addresses."""
    return [memoryview(bytearray(b"x" + bytes(frame)))[1:] for frame in frames]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**70, 1.5, float("inf"), "", "\u00e9\ud800", b"", b"x" * 20_000, bytearray(b"x" * 20_000), (), [], {},
        ((1, 2.0, "a"), {"k": [None, b"b"], 3: ()}), list(range(10_000)), {i: str(i) for i in range(500)}, {1, 2}, 3 + 4j,
        collections.OrderedDict(b=1, a=2), collections.deque([1], maxlen=3), Path("a/b"), range(3), slice(1, 2), ...,
        [HTTPStatus.OK], urlsplit("a://b"), (True, 1, 1.0),
    ],
)  # fmt: skip
def test_round_trip_gives_an_equal_value_of_the_same_type(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)
    assert repr(result) == repr(value)


def test_round_trip_keeps_identity_and_cycles():
    shared = [1]
    value = {"a": shared, "b": shared}
    value["self"] = value
    result = round_trip(value)
    assert result["a"] is result["b"]
    assert result["self"] is result


def size_bytes(frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def test_round_trip_of_functions():
    base = 10
    assert round_trip(lambda x: x + base)(1) == 11
    assert round_trip(functools.partial(lambda x, y: x * y, 3))(4) == 12
    assert round_trip([Path.exists, torch.add, np.sum]) == [Path.exists, torch.add, np.sum]


def test_round_trip_of_script_classes_makes_working_instances():
    script = in_main(
        "import dataclasses, enum\n"
        "class Color(enum.Enum):\n    RED = 1\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n    color: Color = Color.RED\n    def two(self): return 2 * self.x\n"
        "class Slotted:\n    __slots__ = ('x', 'y')\n    def __init__(self): self.x = 5\n"
        "class Failure(Exception):\n    def __init__(self, code): super().__init__(f'code {code}'); self.code = code\n"
        "    def __reduce__(self): return Failure, (self.code,), vars(self)\n",
    )
    error = script.Failure(7)
    error.note = np.array([{"weights": torch.ones(3)}, None], dtype=object)
    point, again, slotted, failure = round_trip([script.Point(3), script.Point(4), script.Slotted(), error])
    assert point.two() == 6
    assert type(point) is type(again)
    assert point.color is script.Color.RED
    assert slotted.x == 5
    assert (str(failure), failure.code) == ("code 7", 7)
    assert failure.note[0]["weights"].tolist() == [1, 1, 1]


def test_round_trip_in_another_process_brings_the_script_with_it(tmp_path):
    script = in_main("class Scale:\n    by = 3\n    def __call__(self, x): return x * self.by * offset\noffset = 100")
    frames = dumps((script.Scale(), torch.arange(10_000), np.arange(10_000)))
    for i, frame in enumerate(frames):
        (tmp_path / f"{i}.bin").write_bytes(frame)
    code = (
        "import pathlib, sys; from gpulayer.wire.serialize import loads\n"
        "frames = [p.read_bytes() for p in sorted(pathlib.Path(sys.argv[1]).glob('*.bin'))]\n"
        "assert 'torch' not in sys.modules\n"
        "scale, tensor, array = loads(frames)\n"
        "tensor += 1; array += 1\n"
        "print(scale(2), int(tensor.sum()), int(array.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["600", "50005000", "50005000"]


def test_loads_lets_a_missing_module_through():
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        loads([b"cno_such_module_here\nf\n."])


def test_import_of_the_module_leaves_torch_and_numpy_out():
    code = "import sys, gpulayer.wire.serialize as s; s.loads(s.dumps(lambda: 1)); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("delivered", [list, writable, shifted])
@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 100_000, MIB])
def test_array_arrives_equal_writable_and_unshared(size, delivered):
    array = np.arange(size, dtype=np.float64)
    frames = dumps(array)
    array += 1
    result = loads(delivered(frames))
    assert np.array_equal(result, np.arange(size))
    assert result.flags.writeable
    assert result.flags.aligned
    assert len(frames) == (2 if array.nbytes >= OUT_OF_BAND_BYTES else 1)


@pytest.mark.parametrize("dtype", ["f2", "c16", "?", ">i4", "M8[ns]", "S7", "U3", [("a", "i4"), ("b", "f8", (2,))], "g"])
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T, lambda a: a[::2, ::3], lambda a: a[:, 1], lambda a: a[1:1]])
def test_array_of_any_type_and_layout_arrives_equal(dtype, view):
    array = view(np.arange(90 * 80).reshape(90, 80).astype(dtype))
    result = round_trip(array)
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)
    assert result.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.frombuffer(bytes(40_000), np.uint8),
        np.broadcast_to(np.arange(3.0), (5000, 3)),
        np.arange(90_000).reshape(300, 300)[:, ::2],
        np.frombuffer(b"ab", np.uint8),
    ],
)
def test_array_that_is_read_only_or_scattered_arrives_writable_and_out_of_band(array):
    frames = dumps([array])
    assert len(frames[0]) < 400
    assert loads(frames)[0].flags.writeable
    assert np.array_equal(loads(frames)[0], array)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_and_layout_arrives_bit_for_bit(dtype):
    whole = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, (256, 48 * dtype.itemsize), np.uint8)
    whole = torch.from_numpy(whole).view(dtype)
    for (name, view), delivered in itertools.product(VIEWS.items(), (list, writable, shifted)):
        tensor = view(whole)
        result = loads(delivered(dumps([tensor])))[0]
        assert (result.dtype, result.shape) == (dtype, tensor.shape), name
        assert raw(result) == raw(tensor), name


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 1, 7), (2, 3, 4, 5, 6), (70_000,)])
@pytest.mark.parametrize("order", [1, -1])
def test_tensor_of_any_shape_keeps_its_strides_and_is_writable(shape, order):
    tensor = torch.randn(shape).permute(tuple(range(len(shape)))[::order])
    result = round_trip(tensor)
    assert result.stride() == tensor.stride()
    assert torch.equal(result, tensor)
    result += 1
    assert not tensor.numel() or not torch.equal(result, tensor)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensor_keeps_requires_grad_and_attributes(requires_grad):
    tensor = torch.ones(3, requires_grad=requires_grad) * 2  # made by a graph, which does not travel
    tensor.tag, tensor.me = "x", tensor
    result = round_trip(tensor)
    assert result.requires_grad is requires_grad
    assert result.is_leaf
    assert result.tag == "x"
    assert result.me is result


def test_nan_payloads_arrive_bit_for_bit():
    bits = np.array([0x7FF8_0000_DEAD_BEEF, 0x7FF0_0000_0000_0001], dtype=np.int64)
    numbers = bits.view(np.float64)
    result, array, tensor = round_trip((float(numbers[0]), numbers, torch.from_numpy(numbers)))
    assert np.float64(result).view(np.int64) == bits[0]
    assert array.view(np.int64).tolist() == tensor.view(torch.int64).tolist() == bits.tolist()


def test_tensor_of_100_mib_goes_out_of_band_behind_a_tiny_header():
    tensor = torch.zeros(100 * MIB, dtype=torch.uint8)
    frames = dumps({"weights": tensor})
    assert [size_bytes([frame]) for frame in frames[1:]] == [100 * MIB]
    assert len(frames[0]) < 512
    tensor.fill_(9)
    assert not loads(frames)["weights"].any()


def test_tensor_below_the_limit_has_no_frame_of_its_own():
    assert len(dumps([torch.zeros(OUT_OF_BAND_BYTES - 1, dtype=torch.uint8)])) == 1
    assert len(dumps([torch.zeros(OUT_OF_BAND_BYTES, dtype=torch.uint8)])) == 2


@pytest.mark.parametrize(
    "view", [lambda t: t[0], lambda t: t[7, 3:9], lambda t: t[:, 5], lambda t: t[::500], lambda t: t[0].expand(9, -1)]
)
def test_view_ships_only_its_own_bytes(view):
    tensor = view(torch.randn(2000, 2000))
    assert torch.equal(round_trip(tensor), tensor)
    assert size_bytes(dumps(tensor)) < 33_000


def test_views_of_one_storage_ship_their_span_once_and_still_share_it():
    whole = torch.randn(4000, 1000)
    one, two, empty = whole[10:30], whole[20:40].view(torch.int32), whole[:0]
    frames = dumps({"one": one, "array": np.zeros(9000), "two": two, "empty": empty})
    assert size_bytes(frames) < 30 * 1000 * 4 + 72_000 + 1000
    result = loads(frames)
    result["one"][10:] = 1.0
    assert (result["two"][:10] == 0x3F80_0000).all()
    assert result["empty"].shape == (0, 1000)
    assert result["array"].shape == (9000,)


def test_values_take_the_memory_of_writable_frames_and_of_no_others():
    sent = [torch.zeros(50_000), np.zeros(50_000)]
    frames = dumps(sent)
    own = writable(frames)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(frame)) for frame in own[1:]]
    assert [loads(own)[0].data_ptr(), loads(own)[1].ctypes.data] == addresses
    for value in loads(frames):
        value += 1
    assert not any(value.any() for value in [*sent, *loads(frames)])


def test_tensor_loads_under_another_default_device():
    frames = dumps([torch.arange(4000), torch.tensor(1)])
    with torch.device("meta"):
        result = loads(frames)
    assert result[0].sum() == 4000 * 3999 // 2


def test_many_tensors_and_arrays_keep_their_places():
    value = [(torch.full((n,), float(n)), np.full(m, m)) for n, m in itertools.product((0, 1, 3000), (1, 900, 2000))]
    for (tensor, array), (tensor_again, array_again) in zip(value, loads(writable(dumps(value))), strict=True):
        assert torch.equal(tensor, tensor_again)
        assert np.array_equal(array, array_again)


def test_parameters_modules_and_tied_weights_stay_what_they_are():
    module = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False), nn.BatchNorm1d(100))
    module[1].weight = module[0].weight
    module[2].weight.requires_grad_(False)
    flat = module[0].weight.data.view(-1)
    result = round_trip({"flat": flat, "module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)})
    again = result["module"]
    assert again[1].weight is again[0].weight
    assert isinstance(again[0].weight, nn.Parameter)
    assert not again[2].weight.requires_grad
    assert result["optimizer"].param_groups[0]["params"][0] is again[0].weight
    again[0].weight.data.view(-1)[0] = 7
    assert result["flat"][0] == 7
    module[0].weight.data.view(-1)[0] = 7
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True))


def test_subclass_storage_and_plain_view_share_one_frame():
    class Tagged(torch.Tensor):
        pass

    whole = torch.arange(10_000)
    frames = dumps([whole.as_subclass(Tagged), whole[5:], whole.untyped_storage()])
    assert len(frames) == 2
    tagged, view, storage = loads(frames)
    view[0] = -1
    assert type(tagged).__name__ == "Tagged"
    assert tagged[5] == -1
    assert storage.data_ptr() == tagged.data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(200).to_sparse(),
        lambda: torch.eye(200, device="meta"),
        lambda: torch.randn(3000, dtype=torch.complex64).conj(),
        lambda: torch.randn(3000, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(3, 4, 100, 100).to(memory_format=torch.channels_last),
    ],
)
def test_tensor_of_another_kind_arrives_equal(make):
    tensor = make()
    result = round_trip(tensor)
    assert (result.layout, result.is_conj(), result.is_neg()) == (tensor.layout, tensor.is_conj(), tensor.is_neg())
    assert result.shape == tensor.shape
    assert tensor.is_meta or torch.equal(result.to_dense(), tensor.to_dense())


def test_tensor_whose_storage_was_freed_is_refused():
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    assert "freed" in str(error_of([tensor]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("wrap", [lambda t: t, nn.Parameter, lambda t: t.untyped_storage(), lambda t: t.to_sparse()])
def test_gpu_tensor_is_refused_with_the_way_out(wrap):
    with pytest.raises(SerializationError, match=r"key 'w' .*tensor on cuda:0; send `tensor\.cpu\(\)`") as caught:
        dumps({"w": wrap(torch.zeros(3, device="cuda"))})
    assert caught.value.device == "cuda:0"


def test_dumps_leaves_no_cycle_that_keeps_the_value():
    value = Holder(tensor=torch.zeros(5000), f=lambda: 1)
    alive = weakref.ref(value)
    gc.collect()
    gc.disable()
    try:
        dumps(value)
        del value
        assert alive() is None
    finally:
        gc.enable()


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Stateful(Holder):
    def __getstate__(self):
        return {"payload": self.payload}


def closing_over(value):
    def train_fn():
        return value

    return train_fn


def with_defaults(y, z):
    return in_main("def f(x, y=y, *, z=z): return x", y=y, z=z).f


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: LOCK, "_thread.lock"),
        (lambda: {"a": [1, (2, LOCK)]}, "dict -> key 'a' -> item 1 -> item 1"),
        (lambda: closing_over(LOCK), "train_fn -> closure variable 'value'"),
        (lambda: closing_over(Holder(lock=LOCK)), "train_fn -> closure variable 'value' -> attribute 'lock'"),
        (lambda: closing_over(closing_over(LOCK)), "train_fn -> closure variable 'value' -> closure variable 'value'"),
        (lambda: in_main("def f(): return [LOCK for _ in '']", LOCK=LOCK).f, "f -> global variable 'LOCK'"),
        (lambda: with_defaults(LOCK, 1), "f -> default of argument 'y'"),
        (lambda: with_defaults(1, LOCK), "f -> default of argument 'z'"),
        (lambda: functools.partial(print, 1, end=LOCK), "functools.partial -> attribute 'keywords' -> key 'end'"),
        (lambda: Holder(lock=LOCK).__init__, "__init__ -> attribute '__self__' -> attribute 'lock'"),
        (lambda: in_main("class A:\n    x = LOCK", LOCK=LOCK).A, "A -> class attribute 'x'"),
        (lambda: in_main("class A:\n    x = LOCK", LOCK=LOCK).A(), "__main__.A -> class -> class attribute 'x'"),
        (lambda: in_main("class A:\n    x = LOCK\nclass B(A): pass", LOCK=LOCK).B, "B -> base class 'A' -> class attribute 'x'"),
        (lambda: in_main("class A:\n    __slots__ = ('b',)\na = A(); a.b = LOCK", LOCK=LOCK).a, "__main__.A -> attribute 'b'"),
        (lambda: [collections.deque([1, LOCK])], "list -> item 0 -> item 1"),
        (lambda: {LOCK: 1}, f"dict -> key {LOCK!r:.60} itself"),
        (lambda: collections.OrderedDict(a=LOCK), "collections.OrderedDict -> key 'a'"),
        (lambda: (nn.Linear(2, 2), {LOCK}), "tuple -> item 1 -> item 0"),
    ],
)  # fmt: skip
def test_error_names_the_variable(make, path):
    error = error_of(make())
    assert (error.path, error.type) == (path, "_thread.lock")
    assert isinstance(error.__cause__, TypeError)
    assert path.rpartition(" -> ")[2] in str(error)


def test_error_reads_as_a_sentence_and_travels_itself():
    error = error_of(closing_over(LOCK))
    start = "cannot send function 'train_fn': its closure variable 'value' (type _thread.lock) cannot be pickled; make it"
    assert str(error).startswith(start)
    assert str(round_trip(error)) == str(error)
    assert round_trip(error).facts == error.facts


def test_error_looks_at_what_is_pickled_not_at_what_stays_behind():
    error = error_of(Stateful(lock=LOCK, payload=(x for x in "")))
    assert error.path.endswith("Stateful -> attribute 'payload'")
    assert error.type == "generator"


def test_error_finds_its_way_through_modules_and_cycles():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].lock = LOCK
    assert error_of(model).path.endswith("attribute '_modules' -> key '1' -> attribute 'lock'")
    parent = Holder()
    parent.child = Holder(parent=parent)
    parent.lock = LOCK
    assert error_of({"p": parent}).path == "dict -> key 'p' -> attribute 'lock'"


def test_error_names_the_object_whose_own_code_fails():
    class Stubborn:
        def __reduce__(self):
            raise LookupError("not today")

        def __repr__(self):
            raise RuntimeError("not even this")

    for value in ([1, Stubborn()], {Stubborn(): 1}):
        error = error_of(value)
        assert "LookupError: not today" in str(error)
        assert isinstance(error.__cause__, LookupError)


def test_error_comes_soon_for_a_large_value():
    value = [(i, [i]) for i in range(50_000)]
    assert "list" in error_of([value, LOCK, torch.zeros(10 * MIB)]).path


def test_nesting_without_end_is_an_error_that_says_so():
    value = []
    for _ in range(200_000):
        value = [value]
    try:
        assert "nested too deeply" in str(error_of(value))
    finally:
        while value:
            value = value.pop()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, NotConnectedError])
def test_dumps_lets_what_is_no_pickling_error_through(error):
    class Interrupted:
        def __reduce__(self):
            raise error("as it is")

    with pytest.raises(error, match="as it is") as caught:
        dumps([Interrupted()])
    assert type(caught.value) is error


def test_explain_unpicklable_works_for_a_value_that_somebody_else_pickled():
    error = explain_unpicklable({"a": LOCK}, TypeError("cannot pickle it"), dumps)
    assert "its key 'a' (type _thread.lock) cannot be pickled" in str(error)
