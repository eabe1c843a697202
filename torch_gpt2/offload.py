"""Activations in the memory of the host between a block's forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class HostMemory:
    """Memory of the host for all that autograd keeps of blocks.

    ``torch.autograd.graph.save_on_cpu`` would also copy parameters, and a tensor once for every
    operator that keeps it. Copies run on the stream of the computation, so the device is never
    read or written too early and the host does not wait.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.moved = 0
        """Bytes that were copied to the host so far."""

    def of_block(self, block: nn.Module, shared: Sequence[Any] = ()) -> saved_tensors_hooks:
        """Return the context of a block's forward pass.

        Parameters, integers, tensors of other devices and ``shared`` ones stay where they are.
        """
        copies: dict[int, tuple[weakref.ref[Any], _Copy]] = {}
        device: torch.device | None = None
        staying: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            nonlocal device, staying
            if device is None:  # FSDP has gathered the parameters by now
                parameters = list(block.parameters())
                kept = (*parameters, *(each for each in shared if isinstance(each, Tensor)))
                device, staying = parameters[0].device, {id(each.untyped_storage()) for each in kept}
            storage = tensor.untyped_storage()
            size, is_number = storage.nbytes(), tensor.is_floating_point() or tensor.dtype == torch.bool
            if not is_number or tensor.device != device or size == 0 or id(storage) in staying:
                return tensor
            known = copies.get(id(storage))
            if known is None or known[0]() is not storage:
                content = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0).view(torch.uint8)
                self.moved += size
                # the storage is free once nothing on the device needs it
                known = copies[id(storage)] = weakref.ref(storage), _Copy(content, pinned=self.pinned)
            return known[1].part(tensor)

        return saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved())


class _Copy:
    """Bytes of a storage on the host, and on the device while operators still need them."""

    def __init__(self, content: Tensor, *, pinned: bool) -> None:
        self._device, self._pinned = content.device, pinned
        self._host = torch.empty(content.shape, dtype=content.dtype, pin_memory=pinned)
        self._host.copy_(content, non_blocking=pinned)
        self._back: Tensor | None = None
        self.uses = 0

    def part(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that brings back a tensor that autograd keeps: its place in the storage."""
        self.uses += 1
        dtype, place = tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset())
        return lambda: self.fetch().view(dtype).as_strided(*place)

    def fetch(self) -> Tensor:
        """Return the bytes on the device, one tensor of them until its last use."""
        back = self._back
        if back is None:
            back = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            back.copy_(self._host, non_blocking=self._pinned)
        self.uses -= 1
        self._back = back if self.uses > 0 else None
        return back
