"""Which path each kernel takes on a device, in words."""

import torch

from circuitscope.kernels.attention import attention_path
from circuitscope.kernels.delta_rule import delta_path
from circuitscope.kernels.selective_scan import selective_scan_path
from circuitscope.kernels.ssd import ssd_path


def kernel_paths(device: torch.device) -> list[tuple[str, str, str]]:
    """(kernel, path, reason) for the dtype that training uses on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    paths = {
        "attention": attention_path,
        "selective scan": selective_scan_path,
        "SSD": ssd_path,
        "delta rule": delta_path,
    }
    found = [(name, *path(device, dtype)) for name, path in paths.items()]
    on_cpu = ("numba", "float32 on the CPU") if device.type == "cpu" else ("torch", "no kernel but torch's there")
    return [*found, ("short and long conv, WKV", *on_cpu)]
