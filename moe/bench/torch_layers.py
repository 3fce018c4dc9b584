"""The dense layer in torch, a dropless MoE layer on torch's own grouped product, and how torch is timed."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe.bench.measure import Case, CaseSkipped
from moe.bench.workload import TOP_K, Workload


class SwiGLU(nn.Module):
    """y = (silu(x wg) * (x wi)) wo, with wg and wi in one product."""

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.gate_and_in = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.out = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x):
        """y of x's shape."""
        gate, h = self.gate_and_in(x).chunk(2, dim=-1)
        return self.out(nn.functional.silu(gate) * h)


class GroupedMoE(nn.Module):
    """A dropless top-2 layer as one would write it on `torch.nn.functional.grouped_mm`."""

    def __init__(self, workload: Workload):
        super().__init__()
        E, M, H = workload.num_experts, workload.d_model, workload.d_hidden
        self.kernel_ME = nn.Parameter(torch.empty(M, E))
        self.wi_EMH = nn.Parameter(torch.empty(E, M, H))
        self.wo_EHM = nn.Parameter(torch.empty(E, H, M))
        self.num_rows: Any = None

    def forward(self, x_1NM):
        """y of x's shape; the rows that the product was given are left in `num_rows`."""
        x_NM = x_1NM[0]
        probs_NE = (x_NM.float() @ self.kernel_ME.float()).softmax(-1)
        gate_NK, expert_NK = probs_NE.topk(TOP_K)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)

        order_R = expert_NK.flatten().argsort(stable=True)
        counts_E = torch.zeros_like(self.kernel_ME[0], dtype=torch.int64)
        counts_E.scatter_add_(0, expert_NK.flatten(), torch.ones_like(order_R))
        ends_E = counts_E.cumsum(0).to(torch.int32)
        self.num_rows = ends_E[-1]

        product = nn.functional.grouped_mm
        h_RH = product(x_NM[order_R // TOP_K], self.wi_EMH, offs=ends_E).relu()
        y_RM = product(h_RH, self.wo_EHM, offs=ends_E)

        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        y_NKM = y_RM[place_R].view(*expert_NK.shape, -1)
        return (y_NKM * gate_NK.to(y_NKM.dtype)[..., None]).sum(1)[None]


def dense(workload: Workload) -> Case:
    """The feed-forward layer with the FLOPs of the experts that one token uses."""
    hidden = TOP_K * workload.d_hidden
    layer = nn.Sequential(
        nn.Linear(workload.d_model, hidden, bias=False),
        nn.ReLU(),
        nn.Linear(hidden, workload.d_model, bias=False),
    )
    return torch_case("dense-torch", layer, workload, note=f"d_hidden {hidden}")


def dense_swiglu(workload: Workload) -> Case:
    """The dense layer that Mixtral is compared with."""
    hidden = TOP_K * workload.d_hidden
    layer = SwiGLU(workload.d_model, hidden)
    return torch_case("dense-torch-swiglu", layer, workload, note=f"d_hidden {hidden}", gated=True)


def grouped(workload: Workload) -> Case:
    """`GroupedMoE` with the workload's router."""
    if not hasattr(nn.functional, "grouped_mm"):
        raise CaseSkipped(f"torch {torch.__version__} has no grouped_mm; 2.10 has")
    layer = GroupedMoE(workload)
    num_assigned = TOP_K * workload.tokens
    return torch_case(
        "torch-grouped",
        layer,
        workload,
        note="dropless, torch.nn.functional.grouped_mm",
        router=layer.kernel_ME,
        computed=lambda: int(layer.num_rows) / num_assigned,
    )


CASES: dict[str, Callable[[Workload], Case]] = {
    "dense-torch": dense,
    "dense-torch-swiglu": dense_swiglu,
    "torch-grouped": grouped,
}


def torch_case(
    name: str,
    layer: nn.Module,
    workload: Workload,
    *,
    note: str,
    router: nn.Parameter | None = None,
    computed: Callable[[], float] | None = None,
    gated: bool = False,
) -> Case:
    """A case of a torch layer that maps (1, N, M) to the same shape.

    `router` is its parameter for the router's kernel, either way round; it is set to the workload's.
    """
    place = _place(workload)
    dtype = getattr(torch, workload.dtype)
    arrays = workload.arrays()
    layer.to(place, dtype)
    _initialise(layer, workload.seed)
    if router is not None:
        kernel_ME = torch.as_tensor(arrays.kernel_ME, device=place)
        transposed = router.shape[0] == workload.num_experts
        with torch.no_grad():
            router.copy_(kernel_ME.T if transposed else kernel_ME)
    layer.train(workload.training)
    x, cotangent = (
        torch.as_tensor(a, device=place).to(dtype)[None] for a in (arrays.x_NM, arrays.cotangent_NM)
    )
    x.requires_grad_()
    wanted = [*layer.parameters(), x]

    def forward():
        with torch.no_grad():
            return layer(x)

    def train():
        return torch.autograd.grad(layer(x), wanted, cotangent, allow_unused=True)

    heaviest = train if workload.training else forward
    return Case(
        name=name,
        note=note,
        forward=forward,
        train=train if workload.training else None,
        wait=functools.partial(_wait, place),
        memory=functools.partial(_cuda_peak if place == "cuda" else _resident_peak, heaviest),
        forward_flops=workload.forward_flops(gated),
        computed=computed,
        gated=gated,
        queued=place == "cuda",
    )


def _place(workload: Workload) -> str:
    """The name of the device for torch; on a CPU its threads are limited too."""
    if workload.device == "cpu":
        torch.set_num_threads(workload.threads)
        return "cpu"
    if not torch.cuda.is_available():
        raise CaseSkipped(f"torch {torch.__version__} sees no GPU; install its CUDA build")
    return "cuda"


def _initialise(layer: nn.Module, seed: int) -> None:
    """Weights of variance 1 / fan-in, whatever the layer left in memory."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim < 2:
                parameter.zero_()
            else:
                parameter.normal_(std=1 / math.sqrt(min(parameter.shape[-2:])))


def _wait(place: str, result: object) -> None:
    if place == "cuda":
        torch.cuda.synchronize()


def _cuda_peak(call: Callable[[], object]) -> tuple[int, str]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, "in torch by its allocator"


def _resident_peak(call: Callable[[], object]) -> tuple[int, str] | None:
    """How much one call raises the resident memory of the process; Linux only.

    For a dense layer it is within 1 % of the sum of the tensors that live at the peak.
    """
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not clear.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else the call would use pages that were freed before
    clear.write_text("5")  # resets the high-water mark
    before = _status_kib(status, "VmRSS")
    result = call()
    peak = _status_kib(status, "VmHWM")
    del result
    return 1024 * (peak - before), "in torch the rise of the resident memory"


def _status_kib(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])
