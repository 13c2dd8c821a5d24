"""The warm-up compiles, or loads, all that requests will run."""

import gc

import pytest
from tiny_models import tiny_gemma3, tiny_llama

from girih import LLM, SamplingParams
from girih.kernels.kernel import Kernel


def known_kernels():
    return {id(kernel): kernel for kernel in gc.get_objects() if type(kernel) is Kernel}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_no_kernel_is_compiled_in_a_request(make, options, tmp_path):
    directory = make(tmp_path, hidden_size=64)
    for kernel in known_kernels().values():
        vars(kernel).pop("address", None)  # as in a process that has run nothing
    with LLM(str(directory), kv_cache_memory="4MiB", max_model_len=128, **options) as llm:
        ready = {key for key, kernel in known_kernels().items() if "address" in vars(kernel)}
        assert ready
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(3, 70)), list(range(3, 60)), [5]], params)
        used = {key for key, kernel in known_kernels().items() if "address" in vars(kernel)}
    assert used == ready
