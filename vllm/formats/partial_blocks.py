"""Partial scale blocks, which tensor parallelism and merged weights leave; always taken exactly.

A shard of 576 rows of a weight with 128-row blocks begins inside a block on every second rank.
Two ways keep the arithmetic exact: refine the scale grid to the greatest block that fits every
shard (a scale repeated is the same scale), or pad each partial block to a whole one with zeros.
"""

from math import gcd, lcm

from vllm.utils.dataclasses import dataclass
from vllm.utils.math_utils import cdiv

Block = tuple[int, int]
"""Rows and columns that share a scale."""


@dataclass(frozen=True, compiled=True)
class Fit:
    """how: `refined` or `padded`. block: scale block after it, of a MoE rows of gate-up and columns
    of down. sizes: what the kernel then computes with, (N, K) of a linear layer, (intermediate,
    hidden) of a MoE. extra_bytes: what it costs per rank.
    """

    how: str
    block: tuple[int, int]
    sizes: tuple[int, int]
    extra_bytes: int
    text: str


@dataclass(frozen=True, compiled=True)
class Axis:
    """One dimension of a weight per rank: sizes of the parts merged along it, and into how many
    shards each was cut."""

    sizes: tuple[int, ...]
    cut: int

    def is_regular(self, block: int) -> bool:
        """Whether blocks lie on a plain grid on every rank; only the very last may be partial."""
        partial = [place for place, size in enumerate(self.sizes, 1) if size % block]
        return not partial or (self.cut == 1 and partial == [len(self.sizes)])

    def refined(self, block: int) -> int:
        """The greatest divisor of `block` whose grid has every border of every shard."""
        if self.is_regular(block):
            return block
        return gcd(block, *self.sizes)

    def num_blocks(self, block: int) -> int:
        """Blocks that the parts touch, on the rank that touches most."""
        # After this many ranks, shards begin at the same places of blocks again.
        period = block // gcd(block, *self.sizes)
        most = 0
        for rank in range(min(self.cut, period)):
            touched = [cdiv((rank + 1) * n, block) - rank * n // block for n in self.sizes]
            most = max(most, sum(touched))
        return most

    def padded(self, block: int) -> int:
        """Size when every block is filled up to a whole one, on the rank that needs most."""
        return self.num_blocks(block) * block


def linear_fit(rows: Axis, columns: Axis, block: Block, takes_any_block: bool) -> Fit | None:
    """How a kernel takes the blocks of a weight [rows, columns]; None for a plain grid."""
    if rows.is_regular(block[0]) and columns.is_regular(block[1]):
        return None
    n, k = sum(rows.sizes), sum(columns.sizes)
    if takes_any_block:
        fine = (rows.refined(block[0]), columns.refined(block[1]))
        extra = _scale_bytes(rows, columns, fine) - _scale_bytes(rows, columns, block)
        text = f"scales refined to {_by(fine)} blocks, +{extra} bytes"
        return Fit("refined", fine, (n, k), extra, text)
    sizes = (rows.padded(block[0]), columns.padded(block[1]))
    extra = sizes[0] * sizes[1] - n * k
    return Fit("padded", block, sizes, extra, f"padded to {_by(sizes)}, +{extra} bytes")


def moe_fit(
    inner: Axis, hidden_size: int, num_experts: int, block: Block, takes_any_block: bool
) -> Fit | None:
    """The same for the experts of one rank, whose gate and up rows and down columns (`inner`) are
    cut alike.

    Padding needs no copy of activations: the rows added to gate and up give zeros, which meet the
    columns added to down. So both get the same, and the block is a common multiple of theirs.
    """
    (size,) = inner.sizes
    gate_up, hidden = Axis((size, size), inner.cut), Axis((hidden_size,), 1)
    if gate_up.is_regular(block[0]) and inner.is_regular(block[1]):
        return None
    if takes_any_block:
        fine = (gate_up.refined(block[0]), inner.refined(block[1]))
        extra = _scale_bytes(gate_up, hidden, (fine[0], block[1]))
        extra += _scale_bytes(hidden, inner, (block[0], fine[1]))
        extra -= _scale_bytes(gate_up, hidden, block) + _scale_bytes(hidden, inner, block)
        extra *= num_experts
        text = f"scales refined to {fine[0]} rows of gate-up, {fine[1]} columns of down"
        text += f", {num_experts} experts: +{extra} bytes"
        return Fit("refined", fine, (size, hidden_size), extra, text)
    padded = gate_up.padded(lcm(*block)) // 2
    extra = num_experts * 3 * (padded - size) * hidden_size
    text = f"intermediate padded from {size} to {padded}, {num_experts} experts: +{extra} bytes"
    return Fit("padded", block, (padded, hidden_size), extra, text)


def _scale_bytes(rows: Axis, columns: Axis, block: Block) -> int:
    return 4 * rows.num_blocks(block[0]) * columns.num_blocks(block[1])


def _by(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}x{sizes[1]}"
