"""Clusters as data."""

import re
from pathlib import Path

import pytest
import yaml

from dseekjax.errors import UserError
from dseekjax.files import shipped_configs
from dseekjax.plan.cluster import cluster_names, load_cluster
from dseekjax.platform import peak_flops


@pytest.mark.parametrize("name", cluster_names())
def test_shipped_clusters_agree_with_their_targets(name):
    cluster = load_cluster(name)
    target = Path(cluster.target).read_text()
    (memory,) = re.findall(r"device_memory_size: (\d+)", target)
    (device,) = re.findall(r'  name: "(.*)"', target)
    assert cluster.memory_bytes == int(memory)
    assert cluster.peak_flops["bfloat16"] == peak_flops(device)
    assert cluster.gpu.split()[0] in device
    assert cluster.within_host.bandwidth > cluster.between_hosts.bandwidth
    assert cluster.dollars_per_gpu_hour > 0


def test_there_are_four():
    assert cluster_names() == ["a100_80gb", "b200", "h100_sxm", "h200"]


@pytest.fixture
def own(tmp_path):
    """Writes a cluster of one's own, some values changed; None leaves one out."""

    def write(**changes):
        values = yaml.safe_load((shipped_configs() / "clusters" / "h100_sxm.yaml").read_text()) | changes
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
        return str(path)

    return write


def test_one_of_ones_own(own, tmp_path):
    assert load_cluster(own(gpus_per_host=4)).gpus_per_host == 4
    (tmp_path / "mine.txtpb").write_text("")
    assert load_cluster(own(target="mine.txtpb")).target == str(tmp_path / "mine.txtpb")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_host": 0}, "gpus_per_host: 0 is wrong"),
        ({"memory_bytes": None}, "memory_bytes is missing: Device memory of a GPU"),
        ({"memory": 1}, "unknown key memory; did you mean memory_bytes?"),
        ({"target": "h1000"}, "target h1000: there is no .*; shipped are a100_80gb, b200, h100_sxm, h200"),
        ({"within_host": {"bandwidth": -1, "latency": 0}}, "within_host.bandwidth: -1 is wrong"),
    ],
)
def test_mistakes(own, changes, message):
    with pytest.raises(UserError, match=message) as error:
        load_cluster(own(**changes))
    assert "own.yaml" in str(error.value)


def test_unknown_clusters():
    with pytest.raises(UserError, match="no cluster h1000; there are a100_80gb, b200, h100_sxm, h200"):
        load_cluster("h1000")
    with pytest.raises(UserError, match=r"--cluster: cannot read nowhere.yaml \(No such file"):
        load_cluster("./nowhere.yaml")
