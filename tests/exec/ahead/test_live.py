"""Memory at a compiled program's peak, by kind, read from live ranges and scheduled text."""

import dataclasses

import pytest

from autoshard.exec.ahead.compile_targets import Compiled
from autoshard.exec.ahead.live_ranges import device_peak, host_arguments, memory_at_peak
from autoshard.planning import Plan, Spec
from tests.exec.planned_programs import handmade, mlp


TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%body (c: (f32[64,128], bf16[4,32,128])) -> (f32[64,128], bf16[4,32,128]) {
  %c = (f32[64,128]{1,0:T(8,128)}, bf16[4,32,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %fast = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} fusion(%c), kind=kLoop, calls=%f
  %stack = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} fusion(%c, %fast), kind=kLoop, calls=%g
}

ENTRY %main (p: f32[64,128], q: f32[64,128], x: f32[4,100]) -> (f32[64,128]) {
  %p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %q = f32[64,128]{1,0:T(8,128)} parameter(1)
  %x = f32[4,100]{1,0:T(4,128)} parameter(2)
  %zeros = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} broadcast(%x)
  %sum = f32[64,128]{1,0:T(8,128)} broadcast(%x)
  %w = (f32[64,128]{1,0:T(8,128)}, bf16[4,32,128]{2,1,0:T(8,128)(2,1)}) while(%t), condition=%k, body=%body
  %wide = f32[32,300]{1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%h
  %new = (f32[64,128]{1,0:T(8,128)}) fusion(%w, %p), kind=kLoop, calls=%u
  %first = f32[64,128]{1,0:T(8,128)} get-tuple-element(%new), index=0
  ROOT %t2 = (f32[64,128]{1,0:T(8,128)}) tuple(%first)
}
"""

LIVE = """HloLiveRange (max 20):
  BufferLiveRange:
    p{}:0-18
    q{}:0-20
    x{}:0-4
    zeros{}:3-5
    sum{}:4-5
    c{}:5-12
    c{0}:5-14
    c{1}:5-9
    fast{}:7-9
    stack{}:9-14
    wide{}:8-16
    new{}:18-20
    new{0}:18-20
  Live ranges at 9 (peak):
    stack{}: 32768 bytes
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    roles = {"w": "parameter", "m": "optimizer_state", "x": "batch"}
    shapes = {"w": (64, 128), "m": (64, 128), "x": (4, 100)}
    specs = {name: Spec.replicated(2) for name in roles}
    return dataclasses.replace(handmade(mlp(), {"data": 8}, {}), arguments=specs, shapes=shapes, roles=roles)


def compiled(live: str) -> Compiled:
    return Compiled(TEXT, {"peak": 1}, 1.0, None, None, "", live)


def test_each_kind_at_the_peak(plan: Plan) -> None:
    """Count a buffer that a loop aliases once, no buffer that aliases an argument, and none in fast memory.

    Tiles are padded: the batch's 100 lanes to 128, 300 to 384.
    """
    assert memory_at_peak(compiled(LIVE), plan) == {
        "parameters": 64 * 128 * 4,
        "optimizer_state": 64 * 128 * 4,
        "batch": 4 * 128 * 4,
        "gradients": 64 * 128 * 4,
        "activations": 4 * 32 * 128 * 2,
        "temporaries": 32 * 384 * 4,
    }


def test_what_a_loop_writes_over_a_donated_argument_is_that_argument(plan: Plan) -> None:
    """Follow a donated argument into the loop, its body and the result, like a cache that layers write to."""
    text = TEXT.replace(
        "%first = f32[64,128]{1,0:T(8,128)} get-tuple-element(%new)",
        "%first = f32[64,128]{1,0:T(8,128)} get-tuple-element(%w)",
    )
    live = (
        LIVE.replace("p{}:0-18", "p{}:0-5")
        .replace("    sum{}:4-5\n", "")
        .replace("c{0}:5-14", "c{0}:5-14\n    w{0}:14-20")
    )
    at_peak = memory_at_peak(dataclasses.replace(compiled(live), text=text), plan)
    assert "gradients" not in at_peak
    # not donated: the loop has its own buffer
    kept = TEXT.replace("input_output_alias={ {0}: (0, {}, may-alias) }", "")
    assert memory_at_peak(dataclasses.replace(compiled(live), text=kept), plan)["gradients"] >= 64 * 128 * 4


def test_without_live_ranges_nothing_is_reported(plan: Plan) -> None:
    assert memory_at_peak(compiled(""), plan) == {}


def test_arguments_on_the_host_are_distinguished() -> None:
    """Subtract arguments on the host, which the compiler counts in its peak although the device does not store them."""
    text = TEXT.replace(
        "%q = f32[64,128]{1,0:T(8,128)} parameter(1)", "%q = f32[64,100]{1,0:T(8,128)S(5)} parameter(1)"
    )
    assert text != TEXT
    assert host_arguments(dataclasses.replace(compiled(LIVE), text=text)) == 64 * 128 * 4
    assert host_arguments(compiled(LIVE)) == 0


STATED = {"arguments": 1000, "results": 400, "donated": 400, "temporaries": 700}


@pytest.mark.parametrize(
    ("peak", "host", "at_peak", "device"),
    [
        (1600, 0, {}, 1600),
        (1600, 500, {}, 1600),  # the device is fuller than its host
        (3000, 2000, {"parameters": 900, "temporaries": 600}, 1500),  # the host is fuller: live ranges decide
        (9000, 0, {"parameters": 900, "temporaries": 600}, 1500),  # the on-chip memory is the fullest
        (9000, 0, {"parameters": 900, "temporaries": 900}, 1700),  # never more than the allocated bytes
        (3000, 2000, {}, 1700),  # without live ranges, the allocated bytes decide
        (0, 0, {}, None),
    ],
)
def test_the_peak_of_a_device_is_not_that_of_stacks_on_its_host(
    peak: int, host: int, at_peak: dict[str, int], device: int | None
) -> None:
    """Recover the device's peak: the compiler states the arguments, and only the fuller memory of the two."""
    stated = dataclasses.replace(compiled(""), memory={**STATED, "peak": peak, "host": host})
    assert device_peak(stated, at_peak) == device
