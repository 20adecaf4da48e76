"""Bytes that move in main memory, from the text of compiled programs: written by hand, and by XLA:CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.pipelines.planning.hlo_text import parse_module
from dspark_jax.pipelines.planning.hlo_traffic import hbm_traffic

MODULE = """HloModule round

%sliced (param_0: bf16[8,128], param_1: s32[]) -> bf16[1,128] {
  %param_0 = bf16[8,128]{1,0} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,128]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,128}
}

%updated (param_0.1: bf16[8,128], param_1.1: bf16[1,128], param_2: s32[]) -> bf16[8,128] {
  %param_0.1 = bf16[8,128]{1,0} parameter(0)
  %param_1.1 = bf16[1,128]{1,0} parameter(1)
  %param_2 = s32[]{:T(128)} parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = bf16[8,128]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero.1)
}

%body (carry: (f32[4])) -> (f32[4]) {
  %carry = (f32[4]{0}) parameter(0)
  %item = f32[4]{0} get-tuple-element(%carry), index=0
  %doubled = f32[4]{0} add(%item, %item)
  ROOT %next = (f32[4]{0}) tuple(%doubled)
}

%condition (carry.1: (f32[4])) -> pred[] {
  %carry.1 = (f32[4]{0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (weights: bf16[8,128], index: s32[], start: f32[4]) -> bf16[8,128] {
  %weights = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights"}
  %index = s32[]{:T(128)} parameter(1)
  %start = f32[4]{0} parameter(2)
  %fetch = (bf16[8,128]{1,0:T(8,128)S(1)}, bf16[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %fetched = bf16[8,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %half = ((bf16[8,128]{1,0}), bf16[4,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%weights), slice={[0:4]}
  %halved = bf16[4,128]{1,0:S(1)} slice-done(%half)
  %used = bf16[8,128]{1,0:T(8,128)S(1)} negate(%fetched)
  %row = bf16[1,128]{1,0} fusion(%weights, %index), kind=kLoop, calls=%sliced, metadata={op_name="jit(f)/lookup"}
  %in_place = bf16[8,128]{1,0} fusion(%weights, %row, %index), kind=kLoop, calls=%updated
  %carried = (f32[4]{0}) tuple(%start)
  %loop = (f32[4]{0}) while(%carried), condition=%condition, body=%body
  %kernel = f32[4]{0} custom-call(%in_place), custom_call_target="tpu_custom_call", backend_config=STATED
  %named = bf16[8,128]{1,0} custom-call(%in_place), custom_call_target="AllocateBuffer"
  ROOT %sum = bf16[8,128]{1,0} add(%in_place, %used)
}
""".replace("STATED", '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"9","bytes_accessed":"1234"}}}')
WHOLE, ROW = 8 * 128 * 2, 128 * 2


def test_arrays_count_where_they_are_and_updates_count_their_entries() -> None:
    found = {one.name: (one.read, one.written) for one in hbm_traffic(MODULE)}
    assert found == {
        "fetch": (WHOLE, 0),  # into fast memory; what is done with it there is free
        "half": (WHOLE // 2, 0),
        "row": (ROW + 4, ROW),
        "in_place": (ROW + 4, ROW),
        "doubled": (2 * 16, 16),  # the body of the loop, once
        "kernel": (1234, 0),
        "sum": (WHOLE, WHOLE),
    }
    assert {one.scope for one in hbm_traffic(MODULE) if one.name == "row"} == {"jit(f)/lookup"}


def test_a_text_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="without an ENTRY"):
        parse_module("%f (x: f32[]) -> f32[] {\n}\n")


def _moved(function: Any, *operands: Any) -> int:
    compiled: Any = jax.jit(function).lower(*operands).compile()
    return sum(one.total for one in hbm_traffic(compiled.as_text()))


def test_programs_of_a_real_compiler() -> None:
    """A product reads its operands and writes its result; a lookup reads its rows and not the table."""
    table, ids = jnp.zeros((4096, 256)), jnp.zeros((3,), jnp.int32)
    product = _moved(lambda x, y: x @ y, jnp.zeros((128, 256)), jnp.zeros((256, 512)))
    assert product == pytest.approx(4 * (128 * 256 + 256 * 512 + 128 * 512), rel=0.01)
    assert _moved(lambda table, ids: table[ids] * 2, table, ids) < table.nbytes / 100
    assert _moved(lambda table: table * 2, table) == pytest.approx(2 * table.nbytes, rel=0.01)
