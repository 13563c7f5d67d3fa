"""Checkpoints that our own quantiser writes."""

import pytest

from vllm.model_executor.quantize import quantize_checkpoint


@pytest.fixture(scope="module")
def quantised(source, tmp_path_factory):
    """quantised(format) -> the folder of the module's `source` in that format; written once."""
    made = {}

    def make(format_name):
        if format_name not in made:
            made[format_name] = tmp_path_factory.mktemp("quantised") / format_name
            quantize_checkpoint(source, made[format_name], format_name)
        return made[format_name]

    return make
