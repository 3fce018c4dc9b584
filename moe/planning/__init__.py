"""The run before it is paid for: memory, communication and time of a step that is only compiled."""

from __future__ import annotations

from moe.planning.ahead import CompiledStep, compile_step
from moe.planning.chips import CHIPS, Chip, Slice, read_slice
from moe.planning.devices import planned_devices, simulated_devices, slice_devices
from moe.planning.page import plan_page
from moe.planning.plan import Exchange, Memory, Parameters, Plan, plan, plan_of
from moe.planning.program import Program
from moe.planning.report import ranking, show
from moe.planning.search import legal_meshes, search
from moe.planning.step_time import StepTime, model_step_time

__all__ = [
    "CHIPS",
    "Chip",
    "CompiledStep",
    "Exchange",
    "Memory",
    "Parameters",
    "Plan",
    "Program",
    "Slice",
    "StepTime",
    "compile_step",
    "legal_meshes",
    "model_step_time",
    "plan",
    "plan_of",
    "plan_page",
    "planned_devices",
    "ranking",
    "read_slice",
    "search",
    "show",
    "simulated_devices",
    "slice_devices",
]
