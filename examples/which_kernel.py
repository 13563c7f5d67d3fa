"""Which kernel would serve a layer on a chip, why this one, and why not the others. Needs neither
the chip nor torch, and takes a fraction of a second.

    python examples/which_kernel.py [LAYER] [CHIP ...]

LAYER: FORMAT:NxK, fp8-block:4096x7168 without it. CHIP: h100, sm_100, 'rtx pro 6000', cpu, ...
`vllm kernels explain MODEL --device CHIP` asks for all layers of a model.
"""

import sys

from vllm.kernels.report.question import device_of, layer_of, libs_of
from vllm.kernels.select.policy import Policy
from vllm.kernels.selection import Selection


def main(layer: str, chips: list[str]) -> None:
    for chip in chips:
        device = device_of(chip)
        name, problem = layer_of(layer, "fp32" if device.kind == "cpu" else "bf16")
        # With every library there is; `none` has torch, triton and our own kernels alone.
        selection = Selection(device, libs_of("all", device), Policy())
        decision = selection.decide(name, problem)
        by = decision.origin.text if decision.origin else ""
        print(f"{layer} on {device}: {decision.chosen or 'no kernel'}, by {by}")
        for candidate in decision.candidates:
            if candidate.reasons:
                print(f"  not {candidate.backend}: {'; '.join(r.text for r in candidate.reasons)}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "fp8-block:4096x7168",
        sys.argv[2:] or ["h100", "b200", "rtx 4090", "cpu"],
    )
