"""A CPU as verl's accelerator, for tests: `VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform VERL_PLATFORM=cpu`.

verl has no such platform; nothing of the package depends on this one. Ray is told of as many GPUs as ranks.
"""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> types.ModuleType:
    """torch.cpu, and the figures of memory that verl asks a device for."""
    module = types.ModuleType("cpu_as_device")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    zero = lambda *_, **__: 0  # noqa: E731
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, zero)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "manual_seed"):
        setattr(module, name, zero)
    module.mem_get_info = lambda *_: (1 << 33, 1 << 33)
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_: "CPU"
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Everything that has no meaning on a CPU is nothing."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def _init_process_group(*args, _init=dist.init_process_group, **kwargs):
    """verl asks for "cpu:gloo,cpu:gloo", which torch refuses."""
    if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
        kwargs["backend"] = "gloo"
    return _init(*args, **kwargs)


dist.init_process_group = _init_process_group
