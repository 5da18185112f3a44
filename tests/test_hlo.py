"""Bytes of collectives are read from the text of compiled programs."""

import pytest

from jaxrl.hlo import collective_bytes

LOOP = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %z = f32[] add(%a, %b)
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} all-reduce(%y), to_apply=%add, metadata={op_name="jit(f)/shard_map/psum"}
  ROOT %t = (s32[], f32[8]) tuple(%i, %x)
}
%cond (p: (s32[], f32[8])) -> pred[] {
  %c = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], /*index=1*/f32[8]) while(%init), condition=%cond, body=%body@KNOWN@
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize("known", [', backend_config={"known_trip_count":{"n":"5"}}', ""], ids=["stated", "compared"])
def test_what_lies_in_a_loop_counts_as_often_as_it_runs(known):
    text = LOOP.replace("@KNOWN@", known)
    assert collective_bytes(text)["all-reduce"] == 5 * 32
    assert collective_bytes(text, "shard_map")["all-reduce"] == 5 * 32
    assert collective_bytes(text, "elsewhere")["all-reduce"] == 0


def test_a_loop_that_does_not_say_how_often_it_runs_is_refused():
    text = LOOP.replace("@KNOWN@", "").replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="does not say how often it runs"):
        collective_bytes(text)


def test_an_asynchronous_collective_counts_once_and_by_its_result():
    """The start's shape holds the operand before the result; update and done run nothing again."""
    text = """
%wrapped (p: f32[4]) -> f32[4] {
  ROOT %a = f32[4]{0} all-to-all(%p), dimensions={0}
}
ENTRY %main (a: f32[4]) -> f32[8] {
  %s = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), dimensions={0}
  %d = f32[8]{0} all-gather-done(%s)
  %u = ((f32[4]), f32[4], u32[]) async-start(%a), calls=%wrapped
  %v = ((f32[4]), f32[4], u32[]) async-update(%u), calls=%wrapped
  %e = f32[4]{0} async-done(%v), calls=%wrapped
  ROOT %p = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%a)
}
"""
    found = collective_bytes(text)
    assert found["all-gather"] == 32
    assert found["all-to-all"] == 16
    assert found["collective-permute"] == 8
