"""What a model of lm-eval 0.4.13 has to do with, without lm-eval: its names, its abstract methods, its requests."""

import abc
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODELS: dict[str, type] = {}


class CacheHook:
    def __init__(self) -> None:
        self.kept: list[tuple[str, tuple[Any, ...], Any]] = []

    def add_partial(self, attr: str, req: tuple[Any, ...], res: Any) -> None:
        self.kept.append((attr, req, res))


class LM(abc.ABC):
    def __init__(self) -> None:
        self.cache_hook = CacheHook()

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None):
        return cls(**arg_dict, **{key: value for key, value in (additional_config or {}).items() if value is not None})


@dataclass
class Instance:
    request_type: str
    doc: dict[str, Any]
    arguments: tuple[Any, ...]
    idx: int
    resps: list[Any] = field(default_factory=list)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments


def register_model(*names: str):
    def decorate(model: type) -> type:
        assert issubclass(model, LM)
        MODELS.update(dict.fromkeys(names, model))
        return model

    return decorate


def install(monkeypatch) -> None:
    """Puts this in the place of lm-eval, for a test."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = register_model  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dseekjax.evaluation.lm_eval", raising=False)
