"""What is known of GPUs, and which of them a device is."""

import pytest

from dseekjax.plan.cluster import load_cluster
from pallas_kernels.gpus import find_gpu, gpu_names, load_gpu


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_is_found_by_the_name_that_jax_gives_it(name):
    gpu = load_gpu(name)
    assert find_gpu(gpu.device_kind) is gpu
    assert gpu.compute_capability in (80, 90, 100)


@pytest.mark.parametrize("name", gpu_names())
def test_peaks_are_those_of_the_clusters(name):
    peaks = dict(load_gpu(name).peak_flops)
    peaks.pop("int8")
    assert peaks == load_cluster(name).peak_flops


def test_what_is_no_known_gpu_is_none():
    assert find_gpu("cpu") is None
    assert find_gpu("NVIDIA H1000") is None
    assert find_gpu("NVIDIA H100 PCIe") is load_gpu("h100_sxm")
    with pytest.raises(ValueError, match="gpu h300: unknown; known are a100_80gb, b200"):
        load_gpu("h300")
