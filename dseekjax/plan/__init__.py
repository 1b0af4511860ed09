"""Planning: what a config needs on a cluster, found by compiling it for GPUs that are not there.

>>> import dseekjax.plan
>>> dseekjax.plan.load_cluster("h100_sxm").gpus_per_host
8

`compile_report(config, cluster, hosts)` gives a `Report`. Names are loaded when they are first used.
"""

import importlib
from typing import Any

_HOMES = {
    "ClusterConfig": "dseekjax.plan.cluster",
    "load_cluster": "dseekjax.plan.cluster",
    "CompilerError": "dseekjax.plan.compile",
    "compile_report": "dseekjax.plan.compile",
    "Report": "dseekjax.plan.report",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dseekjax.plan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
