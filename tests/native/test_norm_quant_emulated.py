"""csrc's RMSNorm with quantisation, kernels and launches, run thread by thread on a CPU.

CUDA is emulated (emulated_cuda/). On a GPU: tests/kernels/gpu/test_fp8_quant.py. Few rows, many
rows and rows that are not aligned go through different code; sums of squares are exact here, so the
results do not depend on which.
"""

import shutil
from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Of Header in norm_quant.cpp.
FIELDS = [
    "type", "is_vector", "num_sms", "m", "k", "num_rows", "group_shift", "is_ue8m0", "is_packed",
    "x", "weight", "out", "has_residual", "q_at", "scales_at", "normed_at", "x_stride",
    "row_stride", "group_stride",
]  # fmt: skip
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FP8 = torch.float8_e4m3fn
MANY_SMS, ONE_SM = 1000, 1  # of which all rows are few, or more than run at a time


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("norm_quant")
    # Apart from the real fp8_ptx.cuh, in whose place comes the emulated one.
    target = folder / "csrc" / "quantization" / "w8a8"
    ignored = shutil.ignore_patterns("fp8_ptx.cuh")
    shutil.copytree(CSRC / "quantization" / "w8a8", target, ignore=ignored)
    shutil.copy(CSRC / "launch.cuh", folder / "csrc")
    (folder / "csrc" / "layers").mkdir()
    shutil.copy(CSRC / "layers" / "peers.h", folder / "csrc" / "layers")
    shutil.copy(HERE / "norm_quant.cpp", folder)
    return compiled(folder / "norm_quant.cpp", folder, "-ffp-contract=off")


def padded(tensor):
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.cat([data, data.new_zeros(-len(data) % 64)])


def run(program, x, residual, weight, num_sms, **values):
    """What becomes of the residual, codes, the words of scales, and normed rows if there is one."""
    m, k = x.shape
    header = {
        "type": TYPES[x.dtype], "is_vector": 1, "num_sms": num_sms, "m": m, "k": k,
        "num_rows": m + 2, "group_shift": 7, "has_residual": int(residual is not None),
        "x_stride": k + 16, "row_stride": -(-k // 128), "group_stride": 1,
    } | values  # fmt: skip
    groups = -(-k >> header["group_shift"])
    words = torch.full((m + 2, groups), -1, dtype=torch.int32)
    kept = torch.empty(0, dtype=torch.uint8) if residual is None else padded(residual)
    codes = torch.zeros(m, k, dtype=torch.uint8)
    header["q_at"] = len(kept)
    header["scales_at"] = len(kept) + len(padded(codes))
    normed = torch.zeros(m, k, dtype=x.dtype)
    if residual is not None:
        header["normed_at"] = header["scales_at"] + len(padded(words))
    place = torch.full((m, k + 16), float("nan")).to(x.dtype)
    place[:, :k] = x
    tensors = {
        "x": place,
        "weight": weight,
        "out": torch.cat([kept, padded(codes), padded(words), padded(normed)]),
    }
    out = emulated.call(program, FIELDS, header, tensors, "out")
    after = None if residual is None else out[: residual.nbytes].view(x.dtype).view(m, k)
    q = out[header["q_at"] :][: m * k].view(FP8).view(m, k)
    scales = out[header["scales_at"] :][: words.nbytes].view(torch.int32).view(words.shape)
    if residual is not None:
        normed = out[header["normed_at"] :][: normed.nbytes].view(x.dtype).view(m, k)
    return after, q, scales, normed


def reference(x, residual, weight):
    """The same by the formula, of scales as floats, and zeros for two rows more."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    k, wide = x.shape[1], total.float()
    mean = wide.square().sum(1, keepdim=True) * torch.tensor(1.0 / k)
    root = (mean + 1e-6).double().sqrt().float()  # both rounded once: torch's own are not always
    y = (wide * root.double().reciprocal().float() * weight).to(x.dtype)
    groups = torch.nn.functional.pad(y.float(), (0, -k % 128)).view(len(y), -1, 128)
    scales = groups.abs().amax(2).clamp(min=1e-10) / torch.tensor(448.0)
    q = (groups / scales[:, :, None]).clamp(-448, 448).flatten(1)[:, :k].to(FP8)
    return total, q, torch.nn.functional.pad(scales, (0, 0, 0, 2)), y


def operands(m, k, dtype, has_residual):
    torch.manual_seed(m + k)
    x = torch.randint(-8, 9, (m, k)).to(dtype)
    residual = torch.randint(-8, 9, (m, k)).to(dtype) if has_residual else None
    return x, residual, torch.rand(k) + 0.5


@pytest.mark.parametrize("num_sms", [MANY_SMS, ONE_SM])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 256), (7, 400), (33, 2560), (70, 512), (5, 8208)])
def test_rows_are_those_of_the_formula(program, num_sms, dtype, has_residual, m, k):
    x, residual, weight = operands(m, k, dtype, has_residual)
    total, q, scales, y = reference(x, residual, weight)
    after, own_q, own_scales, normed = run(program, x, residual, weight, num_sms)
    assert torch.equal(own_scales.view(torch.float32), scales)
    assert torch.equal(own_q.view(torch.uint8), q.view(torch.uint8))
    assert residual is None or (torch.equal(after, total) and torch.equal(normed, y))


@pytest.mark.parametrize(("m", "k"), [(3, 17000), (2, 32768)])
def test_rows_of_several_chunks_a_thread_are_those_of_the_formula(program, m, k):
    x, residual, weight = operands(m, k, torch.bfloat16, True)
    _, q, scales, y = reference(x, residual, weight)
    _, own_q, own_scales, normed = run(
        program, x, residual, weight, MANY_SMS, is_vector=int(k % 16 == 0)
    )
    assert torch.equal(own_scales.view(torch.float32), scales)
    assert torch.equal(own_q.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(normed, y)


@pytest.mark.parametrize("m", [3, 40])
def test_nan_and_packed_scales_do_not_depend_on_the_number_of_rows_at_a_time(program, m):
    x, residual, weight = operands(m, 1040, torch.bfloat16, True)
    x[1, 700], weight[3] = float("nan"), float("inf")
    packed = {"is_ue8m0": 1, "is_packed": 1, "row_stride": 1, "group_stride": m + 2}
    runs = [run(program, x, residual, weight, n, **packed) for n in (MANY_SMS, ONE_SM)]
    for one, other in zip(*runs):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert runs[0][1][1].float().isnan().all() and not runs[0][1][2, 128:].float().isnan().any()
