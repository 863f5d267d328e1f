"""What is read out of XLA's dumps; compiling itself is scripts/aot's business."""

import sys
from dataclasses import replace

import pytest

from pallas_kernels.paged_attention.choice import Shape, make_tiling
from scripts import aot_check
from scripts.aot_dump import count_kernels, parse_thunks, walk
from scripts.aot_hlo import Program
from scripts.aot_step import (
    BLOCK_SIZE,
    CONFIG,
    CONTEXT,
    NUM_ROWS,
    StepReport,
    attention_bytes,
    find_copies,
)

# As XLA 0.11.2 writes it, odd line breaks included.
THUNKS = """\
000: kCommandBuffer [source       | next=128 (1)]
    001: kCopy         [source        | next=002 (1)] kCopy
    002: kCustomKernel [prev=001 (1)  | next=006 (4)] norm grid: [32, 1, 1] threads: [128, 1, 1]
    003: kCustomKernel [prev=002 (1)  | sink        ] paged_attention_decode grid: [8, 196, 1]
128: kConditional   [prev=000 (1) | next=154 (1)]
  false_branch:
    010: kCustomKernel [source       | next=127 (1)] best grid: [4008, 1, 1]
    127: kConditional  [prev=062 (1) | sink        ]
      false_branch:
        No thunks.      true_branch:
        011: kCustomKernel  [source       | next=064 (1)] alternatives grid: [4008, 1, 1]
  true_branch:
    012: kCustomKernel [source       | next=082 (2)] peak grid: [1, 1, 1]
    082: kWhile        [prev=081 (1) | next=089 (1)]
condition:
        083: kCustomKernel [source | sink] compare grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            084: kCublasLtMatmul [source       | next=085 (1)] kCublasLtMatmul
    013: kCustomKernel [prev=082 (1) | sink        ] draw grid: [1, 1, 1]
155: kCustomKernel  [prev=154 (1) | sink        ] pack grid: [1, 1, 1]
"""
METADATA = "".join(
    f'thunk_metadata {{ thunk_info {{ profile_annotation: "{name}" thunk_id: {number} }} }}\n'
    for number, name in {2: "norm.7", 3: "pallas_call.5", 155: "pack", 84: "dot.1"}.items()
)


def test_thunks_are_nested_as_they_run():
    graph, sampling, pack = parse_thunks(THUNKS, METADATA)
    assert [thunk.kind for thunk in graph.branches[""]] == ["kCopy", *["kCustomKernel"] * 2]
    assert [thunk.instruction for thunk in graph.branches[""]] == ["", "norm.7", "pallas_call.5"]
    assert (pack.instruction, pack.branches) == ("pack", {})
    best, nested = sampling.branches["false_branch"]
    assert list(nested.branches) == ["true_branch"] and not best.branches
    _, loop, draw = sampling.branches["true_branch"]
    assert list(loop.branches) == ["condition", "body"] and not draw.branches
    (inner,) = loop.branches["body"]
    assert inner.branches[""][0].instruction == "dot.1"


def test_of_a_conditional_the_shorter_branch_counts():
    thunks = parse_thunks(THUNKS, METADATA)
    assert count_kernels(thunks) == 4  # norm, attention, best, pack
    graphs = {thunk.instruction: graph for thunk, graph in walk(thunks)}
    assert graphs["pallas_call.5"] is thunks[0] and graphs["pack"] is None
    assert "dot.1" not in graphs
    # A library's call is a kernel too.
    assert count_kernels(thunks[1].branches["true_branch"]) == 4


def test_a_wrapped_kernel_counts_once():
    thunks = parse_thunks(
        """\
000: kCommandBuffer [source       | next=128 (1)]
    007: kDynamicSliceFusion [prev=006 (1)  | next=010 (2)] params=8, results=3
        008: kCustomCall [source | sink] kCustomCall
""",
        'profile_annotation: "attention.1" thunk_id: 7',
    )
    assert count_kernels(thunks) == 1
    assert [thunk.instruction for thunk, _ in walk(thunks)] == ["", "attention.1"]


HLO = """\
HloModule jit__step, is_scheduled=true

%gather_rows (p0: bf16[1000,64], p1: s32[4]) -> bf16[4,64] {
  %p0 = bf16[1000,64]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,64]{1,0} gather(%p0, %p1), offset_dims={1}
}

%multiply (p0.1: bf16[4,64], p1.1: bf16[32768,64]) -> bf16[4,32768] {
  %p0.1 = bf16[4,64]{1,0} parameter(0)
  %p1.1 = bf16[32768,64]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,32768]{1,0} dot(%p0.1, %p1.1), lhs_contracting_dims={1}
}

%write (p0.2: bf16[4096,512], p1.2: s32[4], p2.2: bf16[4,512]) -> bf16[4096,512] {
  %p0.2 = bf16[4096,512]{1,0} parameter(0)
  %p1.2 = s32[4]{0} parameter(1)
  %p2.2 = bf16[4,512]{1,0} parameter(2)
  ROOT %scatter.1 = bf16[4096,512]{1,0} scatter(%p0.2, %p1.2, %p2.2), to_apply=%assign
}

%flip (p0.3: bf16[64,32768]) -> f32[32768,64] {
  %p0.3 = bf16[64,32768]{1,0} parameter(0)
  %transpose.1 = bf16[32768,64]{1,0} transpose(%p0.3), dimensions={1,0}
  ROOT %convert.1 = f32[32768,64]{1,0} convert(%transpose.1)
}

ENTRY %main (leaves_0_.1: bf16[1000,64], leaves_1_.1: bf16[64,32768]) -> bf16[4,32768] {
  %leaves_0_.1 = bf16[1000,64]{1,0} parameter(0)
  %leaves_1_.1 = bf16[64,32768]{1,0} parameter(1)
  %kv_cache_0_.1 = bf16[4096,512]{1,0} parameter(2)
  %ids.1 = s32[4]{0} parameter(3)
  %new.1 = bf16[4,512]{1,0} parameter(4)
  %embedded = bf16[4,64]{1,0} fusion(%leaves_0_.1, %ids.1), kind=kLoop, calls=%gather_rows
  %written = bf16[4096,512]{1,0} fusion(%kv_cache_0_.1, %ids.1, %new.1), kind=kInput, calls=%write
  %attention = bf16[4,64]{1,0} custom-call(%written), custom_call_target="__gpu$xla.gpu.triton"
  %view = bf16[32768,64]{1,0} bitcast(%leaves_1_.1)
  ROOT %out = bf16[4,32768]{1,0} fusion(%embedded, %view), kind=kCustom, calls=%multiply
}
"""
FLIP = """\
  %flipped = f32[32768,64]{1,0} fusion(%leaves_1_.1), kind=kLoop, calls=%flip
  %view = bf16[32768,64]{1,0} bitcast(%leaves_1_.1)
"""
COPY = """\
  %copied = bf16[4096,512]{1,0} copy(%kv_cache_0_.1)
  %view = bf16[32768,64]{1,0} bitcast(%leaves_1_.1)
"""
VIEW = "  %view = bf16[32768,64]{1,0} bitcast(%leaves_1_.1)\n"


def test_bytes_are_those_that_kernels_must_move():
    embedded = 2 * 4 * 64 * 2 + 4 * 4  # rows read and written, and their ids
    written = 2 * 4 * 512 * 2 + 4 * 4  # the new rows read and written, not the cache
    out = (4 * 64 + 32768 * 64 + 4 * 32768) * 2
    assert Program(HLO).bytes_moved() == embedded + written + out


def test_hand_written_kernels_are_left_out_wrapped_or_not():
    called = '%attention = bf16[4,64]{1,0} custom-call(%written), custom_call_target="__gpu$xla.gpu'
    assert called in HLO
    wrapped = HLO.replace(
        called + '.triton"',
        "%attention = bf16[4,64]{1,0} fusion(%written), kind=kCustom, calls=%wrapped",
    )
    wrapped += """
%wrapped (p0.4: bf16[4096,512]) -> bf16[4,64] {
  %p0.4 = bf16[4096,512]{1,0} parameter(0)
  ROOT %mpmd_map.1 = bf16[4,64]{1,0} custom-call(%p0.4), custom_call_target="mosaic_gpu_v2"
}
"""
    assert Program(wrapped).bytes_moved() == Program(HLO).bytes_moved()
    assert sum(map(Program(wrapped).is_hand_written, Program(wrapped).kernels())) == 1


def test_a_weight_may_be_gathered_from_or_multiplied_and_nothing_else():
    assert find_copies(Program(HLO)) == []
    assert find_copies(Program(HLO.replace(VIEW, FLIP))) == [
        "flipped copies leaves_1_.1",
        "leaves_1_.1 is read 2 times",
        "flipped makes an array as large as a layer of the cache",
    ]


def test_the_cache_may_be_written_in_place_only():
    assert find_copies(Program(HLO.replace(VIEW, COPY))) == [
        "copied makes an array as large as a layer of the cache"
    ]


GOOD = StepReport(
    target="h200",
    program="decode",
    products="triton",
    backend="triton",
    num_layers=2,
    kernels=46,
    kernels_per_layer=14,
    attention_kernels=3,
    graphs=1,
    attention_graphs=1,
    attention_outside=0,
    outside={},
    host_waits=2,
    cache_bytes=1000,
    aliased_bytes=1000,
    temp_bytes=10,
    temp_limit=10,
    copies=[],
    spill_bytes=0,
    ideal_bytes=100,
    moved_bytes=104,
    compile_s=1.0,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aliased_bytes": 999}, "999 of 1000 bytes"),
        ({"temp_bytes": 11}, "11 bytes of temporary memory"),
        ({"attention_outside": 3}, "3 attention kernels in no CUDA graph"),
        ({"outside": {"kConditional": 2}}, "2 other thunks are in no CUDA graph"),
        ({"copies": ["copy.1 copies leaves_3_.1"]}, "copy.1 copies leaves_3_.1"),
        ({"spill_bytes": 8}, "spills 8 bytes"),
    ],
)
def test_a_problem_says_where_and_what(changes, words):
    assert GOOD.problems() == replace(GOOD, spill_bytes=-1).problems() == []
    (problem,) = replace(GOOD, **changes).problems()
    assert problem.startswith("decode step on h200, products by triton: ") and words in problem


def test_by_plan_attention_reads_the_cache_once():
    shape = Shape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE, "bfloat16")
    tiling = make_tiling(shape, num_sms=132, capability=(9, 0))
    least, planned = attention_bytes(tiling, CONFIG)
    assert least == NUM_ROWS * CONTEXT * CONFIG.num_kv_heads * 2 * CONFIG.head_dim * 2
    assert least < planned < 1.05 * least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--decode-rows 17", "invalid choice: 17"),
        ("--decode-rows 64", "--backend mosaic has"),
        ("--block-sizes 0", "invalid choice: 0"),
        ("--steps --layers 0", "'0' must be a whole number from 1 on"),
        ("--steps --shapes phi-2", "--shapes, --block-sizes and --decode-rows are for kernels"),
        ("--json /nonexistent/x.json", "there is no folder /nonexistent"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_compiles(
    options, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["aot", *options.split()])
    with pytest.raises(SystemExit) as raised:
        aot_check.parse_arguments()
    assert raised.value.code == 2 and message in capsys.readouterr().err


def test_options_have_their_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["aot"])
    args = aot_check.parse_arguments()
    assert (args.shapes, args.block_sizes, args.decode_rows) == (aot_check.SHAPES, [16], 16)
    monkeypatch.setattr(sys, "argv", ["aot", "--backend", "mosaic", "--decode-rows", "64"])
    assert aot_check.parse_arguments().decode_rows == 64
