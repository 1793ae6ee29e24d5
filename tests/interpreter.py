"""Patches of Triton's interpreter that avoid repeated or useless work: the same bits in a quarter of the time.

Each function replaces one part of ``triton.runtime.interpreter``, or of the types in ``triton.language`` that it makes, as they
are in versions 3.6 and 3.7. All but :func:`scan_slab_by_slab` fail at once if a later version lacks that part. If a later version
no longer does the work, the function can be removed. ``conftest.py`` calls :func:`spare_repeated_work` in runs with the
interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np


def spare_repeated_work() -> None:
    """Apply all patches to this process. Call it once, before the first launch."""
    prepare_the_language_once_a_launch()
    disable_unused_overflow_checks()
    look_up_types_once()
    describe_types_once()
    compare_types_by_identity_first()
    combine_types_once()
    skip_checks_of_equal_types()
    keep_operands_made_of_numbers()
    broadcast_by_shapes()
    call_builtins_directly()
    unwrap_by_exact_type()
    look_up_sizes_once()
    add_dimensions_directly()
    scan_slab_by_slab()


def prepare_the_language_once_a_launch() -> None:
    """Patch ``triton.language`` once per launch and module.

    The interpreter does so at every call of a jitted function in a kernel, such as ``tl.cdiv``, which takes half of all time.
    Patching replaces the members of ``triton.language`` and ``triton.language.core`` that the function's module sees by
    interpreted ones. They stay until the launch ends, so that one call per module is enough.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        """Return the replaced members, or ``None`` if they were replaced before.

        Only the launch itself uses the return value, and its call is the first.
        """
        module = id(function.__globals__)
        if module in prepared:
            return None
        prepared.add(module)
        return prepare(function)

    def launch_afresh(self: Any, *arguments: Any, **named: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **named)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_afresh


def disable_unused_overflow_checks() -> None:
    """Stop recomputing integer sums, differences and products in 64 bits for an assertion that is then dropped.

    ``TritonSemantic.device_assert`` drops it, because the interpreter's ``debug`` is off and nothing turns it on.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_up_types_once() -> None:
    """Cache the NumPy dtype of each Triton type. The interpreter builds its whole table anew for each look-up."""
    from triton.runtime import interpreter

    build_and_look_up = interpreter._get_np_dtype
    remembered = functools.cache(build_and_look_up)

    def look_up(type_: Any) -> np.dtype:
        element = type_.scalar
        return build_and_look_up(element) if element.is_ptr() else remembered(element)  # the dtype of a pointer needs no table

    interpreter._get_np_dtype = look_up


def describe_types_once() -> None:
    """Cache the description of block types by element type and shape, and that of tensors by their type.

    Each operation creates the type of its result and a tensor of it, and describes their shape anew, which takes a seventh of
    all time. Nothing modifies a description afterwards. Scalars share the type objects of ``triton.language``.
    """
    from triton import language as tl

    make_type, lower_type, make_tensor = tl.block_type.__init__, tl.block_type.to_ir, tl.tensor.__init__
    types: dict[
        tuple[int, tuple[Any, ...]], tl.block_type
    ] = {}  # keyed by the identity of the element type, which the block type keeps alive

    def described_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        if (known := types.get(key)) is None:
            if len(types) > 10_000:  # each launch makes new pointer types
                types.clear()
            make_type(self, element_ty, shape)
            self.described, self.lowered = {}, []
            types[key] = self
        else:
            self.__dict__.update(known.__dict__)

    def lowered_type(self: Any, builder: Any) -> Any:
        if not self.lowered:  # the interpreter has one builder
            self.lowered.append(lower_type(self, builder))
        return self.lowered[0]

    def described_tensor(self: Any, handle: Any, kind: Any) -> None:
        known = kind.__dict__.get("described")
        if known:
            self.__dict__.update(known)
            self.handle, self.type = handle, kind
        else:
            make_tensor(self, handle, kind)
            described = {name: value for name, value in self.__dict__.items() if name not in ("handle", "type")}
            if known is None:
                kind.described = described
            else:  # other objects of an equal block type share this dictionary
                known.update(described)

    tl.block_type.__init__ = described_type
    tl.block_type.to_ir = lowered_type
    tl.tensor.__init__ = described_tensor


def compare_types_by_identity_first() -> None:
    """Let a type equal itself without a look at its name, and a cast to a tensor's own type return the tensor at once.

    Both operands of each operation are cast to the type of the result, which most have already.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    equal, semantic = tl.dtype.__eq__, type(interpreter.interpreter_semantic)
    cast = semantic.cast

    def equal_or_same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def cast_others(self: Any, given: Any, kind: Any, *rounding: Any, **named: Any) -> Any:
        return given if given.dtype is kind else cast(self, given, kind, *rounding, **named)

    tl.dtype.__eq__ = equal_or_same
    semantic.cast = cast_others


def combine_types_once() -> None:
    """Cache the type of an operation's result by the types of its operands. An error is raised anew each time."""
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    combine = semantic.computation_type_impl
    # The values keep the operands' types alive, so that no other type gets the identity of one.
    known: dict[tuple[int, bool, int, bool, bool], tuple[Any, Any, Any]] = {}

    def combined(self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, div_or_mod: bool) -> Any:
        key = id(left), left_is_scalar, id(right), right_is_scalar, div_or_mod
        if key not in known:
            known[key] = combine(self, left, left_is_scalar, right, right_is_scalar, div_or_mod), left, right
        return known[key][0]

    semantic.computation_type_impl = combined


def skip_checks_of_equal_types() -> None:
    """Return two tensors at once as the operands of an operation where neither has to be converted.

    Neither has to where a pointer has an offset, or where both types are the result's, as equal types mostly are.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    semantic, tensor = type(interpreter.interpreter_semantic), tl.tensor
    check = semantic.binary_op_type_checking_impl
    kept: dict[tuple[str, bool], bool] = {}

    def is_kept(self: Any, kind: Any, div_or_mod: bool) -> bool:
        """Return whether the result of two operands of this type, which is no pointer, has this type."""
        key = kind.name, div_or_mod
        if key not in kept:
            is_number = False
            kept[key] = not kind.is_ptr() and self.computation_type_impl(kind, is_number, kind, is_number, div_or_mod) == kind
        return kept[key]

    def check_others(
        self: Any,
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(left) is tensor and type(right) is tensor:
            offset = allow_lhs_ptr and left.dtype.is_ptr() and right.dtype.is_int()
            if offset or (left.dtype.name == right.dtype.name and is_kept(self, left.dtype, div_or_mod)):
                return self.broadcast_impl_value(left, right)
        return check(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = check_others


def keep_operands_made_of_numbers() -> None:
    """Cache the operand that a Python number becomes beside a tensor, by the number and the tensor's type.

    It becomes a tensor of one element, twice, and then a block. No operation writes to its operands, so that they are read-only
    here. A number that converts the tensor is not cached, nor is nan, which equals nothing.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    semantic, tensor, block_type = type(interpreter.interpreter_semantic), tl.tensor, tl.block_type
    check = semantic.binary_op_type_checking_impl
    operands: dict[tuple[Any, ...], Any] = {}

    def operand(self: Any, given: Any, number: Any, div_or_mod: bool, first: bool) -> Any:
        """Return the number as the first or second operand beside a tensor, or ``None`` if the tensor has to be converted."""
        shape = given.type.shape.values if type(given.type) is block_type else ()
        key = type(number), number, given.dtype.name, *shape, div_or_mod, first
        if (made := operands.get(key)) is None:
            pair = check(self, *((number, given) if first else (given, number)), div_or_mod=div_or_mod)
            if pair[first] is not given:
                return None
            made = pair[not first]
            made.handle.data.flags.writeable = False
            if len(operands) > 1000:
                operands.clear()
            operands[key] = made
        return made

    def check_others(
        self: Any,
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        first = type(right) is tensor
        given, number = (right, left) if first else (left, right)
        known = arithmetic_check and type(number) in (int, float) and type(given) is tensor and not given.dtype.is_ptr()
        if known and number == number and (made := operand(self, given, number, div_or_mod, first)) is not None:
            return (made, given) if first else (given, made)
        return check(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = check_others


def broadcast_by_shapes() -> None:
    """Broadcast operands by lists of integers, where the interpreter compares Triton's tuples.

    Operands are two blocks of as many dimensions, a block and a tensor of one element, or two of these.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    semantic, tensor, block_type = type(interpreter.interpreter_semantic), tl.tensor, tl.block_type
    broadcast = semantic.broadcast_impl_value

    def expanded(self: Any, given: Any, shape: list[int]) -> Any:
        if given.type.shape.values == shape:
            return given
        return tensor(self.builder.create_broadcast(given.handle, shape), block_type(given.dtype, shape))

    def filled(self: Any, given: Any, shape: list[int]) -> Any:
        kind = block_type(given.dtype, shape)
        return tensor(self.builder.create_splat(kind.to_ir(self.builder), given.handle), kind)

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        if type(left.type) is not block_type:
            return (left if type(right.type) is not block_type else filled(self, left, right.type.shape.values)), right
        if type(right.type) is not block_type:
            return left, filled(self, right, left.type.shape.values)
        one, other = left.type.shape.values, right.type.shape.values
        if one == other:
            return left, right
        if len(one) == len(other):
            shape = [theirs if ours == 1 else ours for ours, theirs in zip(one, other, strict=True)]
            if all(theirs in (1, size) for theirs, size in zip(other, shape, strict=True)):
                return expanded(self, left, shape), expanded(self, right, shape)
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_others


def call_builtins_directly() -> None:
    """Call the functions of ``triton.language`` without the two that pass on arguments and check that there is a builder."""
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        assert builder is semantic.builder
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def unwrap_by_exact_type() -> None:
    """Unwrap a ``constexpr``, and return tensors and numbers, before the look at the types that contain others."""
    from triton.language import core

    unwrap, constexpr, plain = core._unwrap_if_constexpr, core.constexpr, (core.tensor, int, float, type(None))

    def unwrap_others(given: Any) -> Any:
        kind = type(given)
        if kind is constexpr:
            return given.value
        return given if kind in plain else unwrap(given)

    core._unwrap_if_constexpr = unwrap_others


def look_up_sizes_once() -> None:
    """Cache the largest number of bytes of an element of a type, which the interpreter checks twice for each result."""
    from triton import language as tl
    from triton.runtime import interpreter

    validate = interpreter._validate_np_data_size
    bytes_of = {kind.name: max(8, kind.primitive_bitwidth) // 8 for kind in vars(tl).values() if type(kind) is tl.dtype}

    def fits(array: np.ndarray, kind: Any) -> bool:
        most = bytes_of.get(kind.name)
        return validate(array, kind) if most is None else array.itemsize <= most

    interpreter._validate_np_data_size = fits


def add_dimensions_directly() -> None:
    """Add a dimension of one element, and fill a block with one value, without the checks of NumPy's functions for that."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder, semantic = type(interpreter.interpreter_builder), type(interpreter.interpreter_semantic)
    handle, tensor, block_type, expand = interpreter.TensorHandle, tl.tensor, tl.block_type, semantic.expand_dims

    def create_expand_dims(self: Any, given: Any, axis: int) -> Any:
        return handle(given.data[(slice(None),) * axis + (None,)], given.dtype.scalar)

    def create_splat(self: Any, kind: Any, given: Any) -> Any:
        data = np.empty(kind.shape.values, dtype=interpreter._get_np_dtype(given.dtype))
        data[...] = given.data
        return handle(data, given.dtype.scalar)

    def expand_block(self: Any, given: Any, axis: int) -> Any:
        if axis < 0 or type(given.type) is not block_type:
            return expand(self, given, axis)
        shape = list(given.type.shape.values)
        shape.insert(axis, 1)
        return tensor(self.builder.create_expand_dims(given.handle, axis), block_type(given.dtype, shape))

    builder.create_expand_dims, builder.create_splat, semantic.expand_dims = create_expand_dims, create_splat, expand_block


def scan_slab_by_slab() -> None:
    """Make ``tl.associative_scan`` combine a whole slab at once: all elements of one step of the axis.

    The interpreter calls the combine function element by element. The function is elementwise, so whole slabs give the same
    bits.
    """
    from triton.runtime import interpreter

    def scan(self: Any, given: tuple[Any, ...]) -> list[Any]:
        types = [each.dtype for each in given]
        steps = [np.moveaxis(each.handle.data, self.axis, 0) for each in given]
        scanned = [values.copy() for values in steps]
        for index in range(1, len(steps[0])):
            before, now = (
                [self.to_tensor(values[at], dtype) for values, dtype in zip(source, types, strict=True)]
                for source, at in ((scanned, index - 1), (steps, index))
            )
            combined = self.combine_fn.fn(*before, *now)
            for values, result in zip(scanned, combined if isinstance(combined, tuple) else (combined,), strict=True):
                values[index] = result.handle.data.reshape(values[index].shape)
        return [self.to_tensor(np.moveaxis(values, 0, self.axis), dtype) for values, dtype in zip(scanned, types, strict=True)]

    interpreter.ScanOps.generic_scan = scan
