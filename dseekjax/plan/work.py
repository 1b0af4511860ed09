"""What an instruction computes: matrix products and the kernel that runs them."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dseekjax.plan.hlo import Array, Computation, Instruction, Module

Flops = Counter[str]
"""FLOPs of matrix products by the dtype of their operands, as XLA names it."""

LIBRARY_KERNELS = {
    "__cublas$gemm": "cublas gemm",
    "__cublas$lt$matmul": "cublasLt matmul",
    "__cublas$lt$matmul$f8": "cublasLt fp8 matmul",
    "__cublas$lt$groupedMatmul": "cublasLt grouped matmul",
}
TRITON_CALL = "__gpu$xla.gpu.triton"
FUSION_KERNELS = {
    "__triton_gemm": "triton gemm fusion",
    "__triton_nested_gemm_fusion": "triton gemm fusion",
    "__triton": "triton fusion",
    "__cudnn$fusion": "cudnn fusion",
}


class Work:
    """Counts FLOPs and names kernels; remembers what it counted in fusions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._of_fusion: dict[str, Flops] = {}

    def of_instruction(self, computation: Computation, instruction: Instruction) -> Flops:
        """FLOPs of an instruction; convolutions that are left to cuDNN do not count."""
        match instruction.opcode.removesuffix("-start"):
            case "dot" | "scaled-dot":
                left = computation.operand(instruction, 0).arrays[0]
                contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
                return _product(left, instruction.arrays[0], contracted)
            case "convolution":
                return _convolution(computation, instruction)
            case "fusion":
                return self._of_fused(self._module.called(instruction, "calls"))
            case "custom-call":
                return _library_call(computation, instruction)
        return Counter()

    def kernel(self, computation: Computation, instruction: Instruction) -> str | None:
        """What runs an instruction, in words; None for what is no kernel, a copy or bookkeeping."""
        match instruction.opcode.removesuffix("-start"):
            case "dot" | "scaled-dot" | "convolution":
                return f"{instruction.opcode} outside of any library"
            case "custom-call":
                target = (instruction.attribute("custom_call_target") or "").strip('"')
                if target == TRITON_CALL:
                    return f"triton kernel {_triton_name(instruction)}"
                if target.startswith("__cudnn$fmha"):
                    return "cudnn attention backward" if target.endswith("Backward") else "cudnn attention forward"
                return LIBRARY_KERNELS.get(target, f"custom call {target}")
            case "fusion":
                fusion: Mapping[str, Any] = instruction.backend_config.get("fusion_backend_config") or {}
                written = (instruction.attribute("kind") or "kUnknown").removeprefix("k").lower()
                name = FUSION_KERNELS.get(fusion.get("kind", ""), f"{written} fusion")
                if name != "triton gemm fusion":
                    return name
                flops = self.of_instruction(computation, instruction)
                return "triton fp8 gemm fusion" if any(dtype.startswith("f8") for dtype in flops) else name
        return None

    def _of_fused(self, computation: Computation) -> Flops:
        if computation.name not in self._of_fusion:
            total: Flops = Counter()
            for instruction in computation.instructions:
                total.update(self.of_instruction(computation, instruction))
            self._of_fusion[computation.name] = total
        return self._of_fusion[computation.name]


def _product(left: Array, result: Array, contracted: list[int]) -> Flops:
    return Counter({left.dtype: 2 * result.size * math.prod(left.dimensions[place] for place in contracted)})


def _convolution(computation: Computation, instruction: Instruction) -> Flops:
    """Every output element takes a multiply-add per kernel element of its output feature."""
    labels = (instruction.attribute("dim_labels") or "").replace("->", "_").split("_")
    kernel = computation.operand(instruction, 1).arrays[0]
    features = kernel.dimensions[labels[1].index("o")]
    return Counter({kernel.dtype: 2 * instruction.arrays[0].size * kernel.size // features})


def _library_call(computation: Computation, instruction: Instruction) -> Flops:
    target = instruction.attribute("custom_call_target") or ""
    config = instruction.backend_config
    if "cublas" in target and "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        left = computation.operand(instruction, 0).arrays[0]
        contracted = [int(place) for place in numbers["lhs_contracting_dimensions"]]
        return _product(left, instruction.arrays[0], contracted)
    if "cudnn$fmha" in target and "cudnn_fmha_backend_config" in config:
        attention = config["cudnn_fmha_backend_config"]
        query = computation.operand(instruction, 0).arrays[0]
        scores = math.prod(int(size) for size in attention["intermediate_tensor_shape"]["dimensions"])
        # Two products forward; five backward, as it computes the scores again. A causal mask halves them.
        products = 5 if "Backward" in target else 2
        flops = products * 2 * scores * query.dimensions[-1]
        return Counter({query.dtype: flops // (2 if "CAUSAL" in attention.get("mask_type", "") else 1)})
    if TRITON_CALL in target:
        # JSON in a string of MLIR, which writes a quote as \22, in HLO, which writes a backslash twice.
        noted = re.search(r"flops\\*22: \\*22(\d+)\\", instruction.attributes)
        return Counter({computation.operand(instruction, 0).arrays[0].dtype: int(noted[1]) if noted else 0})
    return Counter()


def _triton_name(instruction: Instruction) -> str:
    named = re.search(r'\bname = \\?"(\w+)', instruction.attributes)
    return named[1] if named else "without a name"


def _numbers(attribute: str | None) -> list[int]:
    return [int(number) for number in (attribute or "{}").strip("{}").split(",") if number]
