"""csrc's FP8 block GEMM of Hopper, kernels and launches, run thread by thread on a CPU.

CUDA is emulated (emulated_cuda/), TMA and wgmma among it: this checks every index and number of the
code, not that a GPU does what PTX says (tests/kernels/gpu/test_block_gemm.py). What lies beside the
operands and in shared memory is NaN, so that a row that met another's scale, or none, would show;
the program fails where a row outside x, or a scale of such a row, is asked for.
"""

import shutil
import subprocess
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled
from slow import quick

HERE = Path(__file__).parent
GEMM = HERE.parents[1] / "csrc" / "gemm"
# Of Header in sm90_fp8.cpp.
FIELDS = [
    "tile_m", "tile_n", "cluster", "is_split", "num_sms", "is_bf16",
    "x", "x_scales", "weight", "scales", "bias", "offsets", "out", "m", "n", "k", "num_experts",
    "x_scales_ld", "x_scales_ldk", "ldx", "ldw", "ldo", "may_be_outside", "has_nan",
]  # fmt: skip
FP8 = torch.float8_e4m3fn
NAN = float("nan")
TILES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 128)]
SPLIT = [(64, 32, 1, 1), (64, 32, 2, 1), (128, 64, 3, 1), (64, 32, 8, 1)]
TILINGS = [*SPLIT, *((m, n, cluster, 0) for m, n in TILES for cluster in (1, 2))]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sm90_fp8")
    # Apart from the real sm90_fp8_ptx.cuh, in whose place comes the emulated one.
    for path in (*GEMM.glob("sm90_fp8_*"), *GEMM.glob("tensor_map.*"), HERE / "sm90_fp8.cpp"):
        if path.name != "sm90_fp8_ptx.cuh":
            shutil.copy(path, folder)
    # The kernel's shared memory is declared in it, and made by the emulation before.
    return compiled(folder / "sm90_fp8.cpp", folder, "-fno-extern-tls-init")


def among_nan(matrix, columns):
    rows, width = matrix.shape
    place = torch.full((rows + 8, width + columns), NAN).to(matrix.dtype)
    place[:rows, :width] = matrix
    return place


def integers(*shape):
    return torch.randint(-4, 5, shape).to(FP8)


def powers_of_two(*shape):
    return torch.exp2(torch.randint(-1, 2, shape).float())


def blocks(size):
    return -(-size // 128)


def wide_of(q, scales, rows):
    spread = scales.double().repeat_interleave(rows, -2)[..., : q.shape[-2], :]
    return q.double() * spread.repeat_interleave(128, -1)[..., : q.shape[-1]]


def multiply(program, tiling, x, x_scales, weight, scales, bias=None, offsets=None, **values):
    """out, which is NaN where nothing was written."""
    (m, k), n = x.shape, weight.shape[-2]
    padding = 0 if tiling[0] == 256 else n % 2 * 3
    out = torch.full((m + 1, n + padding), NAN, dtype=torch.bfloat16)
    header = dict(zip(("tile_m", "tile_n", "cluster", "is_split"), tiling)) | {
        "num_sms": 3, "is_bf16": 1, "m": m, "n": n, "k": k,
        "num_experts": weight.shape[0] if weight.dim() == 3 else 1,
        "x_scales_ld": 1, "x_scales_ldk": m + 256, "ldx": k + 16, "ldw": k, "ldo": n + padding,
    }  # fmt: skip
    parts = {
        "x": among_nan(x, 16), "x_scales": among_nan(x_scales.t(), 256), "weight": weight,
        "scales": scales, "bias": bias, "offsets": offsets, "out": out,
    }  # fmt: skip
    written = emulated.call(program, FIELDS, header | values, parts, "out")
    assert written[m:].isnan().all() and written[:, n:].isnan().all()
    return written[:m, :n]


def check_dense(program, tiling, m, n, k, **values):
    x, weight = integers(m, k), integers(n, k)
    x_scales, scales = powers_of_two(m, blocks(k)), powers_of_two(blocks(n), blocks(k))
    bias = torch.randint(-8, 9, (n,)).float() if m % 2 else None
    expected = wide_of(x, x_scales, 1) @ wide_of(weight, scales, 128).t()
    if bias is not None:
        expected += bias.double()
    out = multiply(program, tiling, x, x_scales, weight, scales, bias, **values)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("tiling", quick(TILINGS, TILINGS[::8]), ids=str)
def test_every_tiling_is_exact_and_reads_no_row_outside(program, tiling):
    tile_m, _, cluster, is_split = tiling
    for m in (1, 2, tile_m - 1, tile_m, tile_m + 1, 2 * tile_m - 1, 2 * tile_m + 3):
        # Each thread block of a cluster copies its half of a tile, of which there may be less.
        is_halved = cluster > 1 and not is_split and m < tile_m
        n, k = (160 if tile_m == 256 else 77, 272)
        values = {"num_sms": 132 if m == tile_m else 3, "may_be_outside": int(is_halved)}
        check_dense(program, tiling, m, n, k, **values)


@pytest.mark.parametrize("m", [1, 63, 65, 129, 191, 192, 193, 255, 257, 300])
def test_the_tiling_that_is_chosen_is_exact(program, m):
    check_dense(program, (0, 0, 0, 0), m, 264, 144, num_sms=132)


@pytest.mark.parametrize(
    ("m", "n", "k", "launches"),
    [
        # 14 rows of 32 tall tiles would be 4 rounds of 132: 12 are 3, and 128 small ones are one.
        (3500, 4096, 4096, "3072 of 256, 428 of 128"),
        (3500, 6144, 4096, "3328 of 256, 172 of 128"),
        (4096, 4096, 4096, "4096 of 256"),  # the last of 4 rounds is nearly full
        (3500, 4096, 1024, "3500 of 128"),  # a second launch would cost more than it saves
        (512, 4096, 4096, "512 of 128"),
        (192, 4096, 4096, "192 of 128"),
    ],
)
def test_the_last_round_of_tall_tiles_may_be_one_of_smaller(program, m, n, k, launches):
    words = [program, "plan", *map(str, (m, n, k, 132))]
    assert subprocess.run(words, capture_output=True, text=True).stdout == launches


@pytest.mark.parametrize("m", [513, 600])
def test_a_product_in_two_launches_is_exact(program, m):
    words = [program, "plan", *map(str, (m, 416, 2064, 2))]
    assert "," in subprocess.run(words, capture_output=True, text=True).stdout
    check_dense(program, (0, 0, 0, 0), m, 416, 2064, num_sms=2)


@pytest.mark.slow
def test_all_elements_of_all_sizes_are_written_once_by_a_tile_that_has_their_scale(program):
    """Dense with 1 to 1,100 tokens and more than a band of tiles has, and 150 sets of experts."""
    done = subprocess.run([program, "walk"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n")


@pytest.mark.parametrize("tiling", [t for t in TILINGS if not t[3]], ids=str)
@pytest.mark.parametrize("counts", [(5,), (0, 300, 1, 0, 64, 65, 0), (2,) * 35 + (131,)], ids=str)
def test_every_expert_gets_its_rows(program, tiling, counts):
    offsets = [10, *accumulate(counts, initial=10)][1:]
    m, n, k = offsets[-1] + 3, 96, 144
    x, weight = integers(m, k), integers(len(counts), n, k)
    x_scales, scales = powers_of_two(m, 2), powers_of_two(len(counts), 1, 2)
    x_scales[:10], x_scales[offsets[-1] :] = NAN, NAN
    given = torch.tensor(offsets).int()
    out = multiply(program, tiling, x, x_scales, weight, scales, None, given, may_be_outside=1)
    wide, weights = wide_of(x, x_scales, 1), wide_of(weight, scales, 128)
    for (begin, end), one in zip(pairwise(offsets), weights):
        assert torch.equal(out[begin:end], (wide[begin:end] @ one.t()).bfloat16())
    assert out[:10].isnan().all() and out[offsets[-1] :].isnan().all()


def test_a_single_expert_gets_its_rows_in_one_launch(program):
    """A dense product of this size is two (above); here the GPU alone knows where rows begin."""
    m, n, k = 600, 416, 2064
    x, weight = integers(m, k), integers(1, n, k)
    x_scales, scales = powers_of_two(m, blocks(k)), powers_of_two(1, blocks(n), blocks(k))
    offsets = torch.tensor([40, m]).int()
    out = multiply(
        program, (0, 0, 0, 0), x, x_scales, weight, scales, None, offsets, num_sms=2,
        may_be_outside=1,
    )  # fmt: skip
    expected = wide_of(x, x_scales, 1) @ wide_of(weight, scales, 128)[0].t()
    assert torch.equal(out[40:], expected[40:].bfloat16())
    assert out[:40].isnan().all()


@pytest.mark.parametrize("tiling", [SPLIT[1], (64, 64, 1, 0), (128, 64, 1, 0), (256, 128, 2, 0)])
def test_nan_stays_in_its_row(program, tiling):
    m, n, k = tiling[0] + 9, 96, 272
    x, weight = integers(m, k), integers(n, k)
    x_scales, scales = powers_of_two(m, 3), powers_of_two(1, 3)
    expected = wide_of(x, x_scales, 1) @ wide_of(weight, scales, 128).t()
    x[3, 200], x[m - 20, 7], x_scales[m - 1, 2], x_scales[40, 0] = NAN, NAN, NAN, NAN
    expected[[3, 40, m - 20, m - 1]] = NAN
    out = multiply(program, tiling, x, x_scales, weight, scales, has_nan=1)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.bfloat16().nan_to_num())
