"""`KernelSpec`: what one kernel supports, as data."""

from collections.abc import Callable

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels.select.known_bad import KnownBad
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Reason
from vllm.utils.dataclasses import dataclass

COMPILERS = ("flashinfer", "humming", "nvcc", "triton")
"""Values of `KernelSpec.compiles`, the slowest first: tens of seconds for a kernel, several
kernels of nvcc's for every weight size, three seconds, one second."""

STORED, UP_FIRST = "stored", "up-first"
"""Layouts of a weight that several kernels take: as the checkpoint has it, and of experts the rows
of up before those of gate (`MoETensors.up_first`)."""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel of a backend for one problem family; compared by identity.

    A backend may have several per family, for different formats.
    """

    backend: str
    family: str
    devices: frozenset[str]
    """Families (`sm_9x`) or single chips (`sm_89`)."""
    formats: frozenset[str]
    dtypes: frozenset[str]
    act: frozenset[ActScheme] = frozenset({ActScheme.NONE})
    libs: tuple[tuple[str, str], ...] = ()
    """Names and lowest versions, "" for any."""
    native: tuple[str, ...] = ()
    """Names of our own CUDA kernels in arch_manifest.json."""
    native_archs: frozenset[str] = frozenset()
    """What they are compiled for; the library must carry one that serves the chip."""
    carries: tuple[tuple[str, str, str], ...] = ()
    """(device family, library, architecture): there the library must list the architecture."""
    prebuilt: tuple[tuple[str, str, str], ...] = ()
    """(device family or chip, library, module): there the library must list the module, which
    takes too long to build at a first call."""
    blocks: frozenset[tuple[int, int]] = frozenset()
    """Scale blocks it takes; empty for any."""
    pads: bool = False
    """It takes partial blocks as whole ones, filled up with zeros, though it takes blocks of any
    size."""
    scales: tuple[tuple[str, Scales], ...] = ()
    """Form of scales by device family, `*` for every family."""
    n_align: int = 1
    k_align: int = 1
    max_tokens: int | None = None
    """Most tokens of a call; None for any number."""
    compiles: str = ""
    """Which of COMPILERS builds it at run time; "" for one that is built ahead of time."""
    weight_layouts: tuple[str, ...] = (STORED,)
    """Layouts of the weight that it takes, the preferred one first: parts of a split share one.
    Besides STORED and UP_FIRST each is of one backend alone."""
    has_one_input_scale: bool = False
    """Of experts with static activation scales: it quantises tokens once, by the largest input
    scale of all experts (`MoETensors.with_one_input_scale`)."""
    waits: bool = False
    """On a GPU the host waits for it in each call: no CUDA graph can hold a step with it."""
    layouts: frozenset[str] = frozenset({"standard"})
    """Activation layouts of a MoE kernel."""
    activation_functions: frozenset[str] = frozenset({"silu"})
    """Values of `MoEProblem.activation` that a MoE kernel computes."""
    variants: frozenset[str] = frozenset()
    """Variants of attention that it computes besides the plain one."""
    takes_bias: bool = True
    """Of a linear kernel."""
    takes_expert_bias: bool = False
    """Of a MoE kernel: biases of both products."""
    is_emulation: bool = False
    guarantees: frozenset[str] = frozenset()
    ran_on: frozenset[str] = frozenset()
    """Where its results were compared (`grade.ran_on`)."""
    known_bad: tuple[KnownBad, ...] = ()
    """Of its libraries."""
    check: Callable[[Problem], list[Reason]] | None = None
    """What data cannot say."""

    @property
    def refines(self) -> bool:
        """Whether it takes partial blocks by a finer grid of scales."""
        return not self.blocks and not self.pads
