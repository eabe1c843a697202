"""What the config means in the words of a vendor's own settings; pure functions, without the framework."""

from __future__ import annotations

from typing import Any

from common.config.schema import RunConfig


def mindspore_context(config: RunConfig) -> dict[str, Any]:
    """Arguments of mindspore.set_context, apart from the device, which set_device takes."""
    context = config.context
    settings: dict[str, Any] = {"mode": {"graph": 0, "pynative": 1}[context.mode], "max_call_depth": context.max_call_depth}
    if context.save_graphs:
        settings |= {"save_graphs": True, "save_graphs_path": context.save_graphs_path or f"{config.output_dir}/graph"}
    if context.enable_graph_kernel:
        settings |= {"enable_graph_kernel": True}
        if context.graph_kernel_flags:
            settings |= {"graph_kernel_flags": context.graph_kernel_flags}
    if context.max_device_memory:
        settings |= {"max_device_memory": context.max_device_memory}
    return settings
