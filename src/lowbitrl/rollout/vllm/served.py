"""What a worker serves of one vLLM module: bytes in stable storage, and the product that reads them.

Storage is allocated once, when the model has been loaded, and only written to afterwards, so that captured
graphs and whatever was derived from an address stay right. A product is one opaque op by the module's key.

    device   weights                        what multiplies
    CPU      any                            decoded values, kept beside the bytes (torch; the reference)
    CUDA     NVFP4, INT4 in groups          the bytes (kernels.w4a16_matmul), activations decoded to BF16
    CUDA     FP8, INT8 on both sides        the codes (kernels.w8a8_matmul)
    CUDA     any other                      decoded values, kept
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbitrl.formats import QuantizedTensor
from lowbitrl.kernels import w4a16_matmul, w8a8_matmul
from lowbitrl.kernels.weights4 import why_not_weight4
from lowbitrl.quant import LayerPlan
from lowbitrl.quant.linear import multiplies_codes
from lowbitrl.rollout.vllm.real_tokens import ServedSite
from lowbitrl.rollout.vllm.slices import Span, cut_columns, cut_rows, join_rows

Write = tuple[Tensor, Tensor | QuantizedTensor]
PARTS = ("qdata", "scale", "global_scale")


@dataclass(frozen=True)
class Member:
    """A published matrix of which a module serves rows and columns: the plan's row of it, and which."""

    row: LayerPlan
    rows: Span

    def bytes_of(self, arrived: Mapping[str, Tensor], columns: Span) -> QuantizedTensor:
        """This rank's part of the published bytes."""
        parts = {part: arrived[name] for part in PARTS if (name := f"{self.row.name}.{part}") in arrived}
        assert self.row.weight is not None
        whole = QuantizedTensor.from_tensors(parts, self.row.shape, self.row.weight)
        return cut_columns(cut_rows(whole, self.rows, self.row.name), columns, self.row.name)

    @property
    def height(self) -> int:
        """Rows held."""
        return self.rows[1] - self.rows[0]

    def names(self, arrived: Mapping[str, Tensor]) -> list[str]:
        """What the published tensors of this matrix are called."""
        if self.row.weight is None:
            return [self.row.parameter]
        return [n for n in (f"{self.row.name}.{part}" for part in PARTS) if n in arrived]


class Store:
    """Bytes and, where products need them, decoded values, registered on a module under `prefix`.

    Args:
        encoded: bytes of the weights that were loaded; None where the weight stays as it is.
        plain: those weights in the compute dtype.
        keep: whether to hold decoded values.
    """

    def __init__(
        self, module: nn.Module, prefix: str, encoded: QuantizedTensor | None, plain: Tensor, keep: bool
    ) -> None:
        self.encoded, self.dtype = None, plain.dtype
        self.decoded: Tensor | None = None
        if encoded is not None:
            parts = {
                key: part.clone(memory_format=torch.contiguous_format)
                for key, part in encoded.tensors().items()
            }
            for key, part in parts.items():
                module.register_parameter(f"{prefix}{key}", nn.Parameter(part, requires_grad=False))
            held = {key: getattr(module, f"{prefix}{key}").data for key in parts}
            self.encoded = QuantizedTensor.from_tensors(held, encoded.shape, encoded.format)
        if encoded is None or keep:
            value = plain if encoded is None else encoded.dequantize(plain.dtype)
            module.register_parameter(
                f"{prefix}weight", nn.Parameter(value.contiguous(), requires_grad=False)
            )
            self.decoded = getattr(module, f"{prefix}weight").data

    def writes(self, new: QuantizedTensor | Tensor, name: str) -> Iterator[Write]:
        """(storage, value) pairs that make this store serve `new`; nothing is written.

        Raises:
            ValueError: the layout of the bytes is not that of the storage.
        """
        if isinstance(new, Tensor):
            assert self.decoded is not None
            yield checked(self.decoded, new, name)
            return
        assert self.encoded is not None
        held, parts = self.encoded.tensors(), new.tensors()
        for key in held:
            yield checked(held[key], parts[key].reshape(held[key].shape), f"{name}.{key}")
        if self.decoded is not None:
            yield self.decoded, new  # decoded when it is written: not all layers' values at once


def checked(storage: Tensor, value: Tensor, name: str) -> Write:
    """The pair, if a copy would change no shape and round no value."""
    if storage.shape != value.shape or storage.dtype != value.dtype:
        raise ValueError(
            f"{name} comes as {value.dtype} {tuple(value.shape)}, the worker holds {storage.dtype} "
            f"{tuple(storage.shape)}; engine and learner must load the same model with the same dtype"
        )
    return storage, value


@dataclass(frozen=True)
class Run:
    """Neighbours in a fused matrix whose bytes are of one format: one store, one product."""

    members: tuple[Member, ...]
    store: Store

    @property
    def height(self) -> int:
        """Output rows."""
        return sum(m.height for m in self.members)

    def product(self, x: Tensor, site: ServedSite | None, bias: Tensor | None) -> Tensor:
        """(T, K) -> (T, height)."""
        encoded = self.store.encoded
        if encoded is not None and multiplies_codes(x, site, encoded):
            assert site is not None
            return w8a8_matmul(site.codes(x), encoded, bias=bias)
        x = x if site is None else site(x)
        if self.store.decoded is None:
            assert encoded is not None
            return w4a16_matmul(x, encoded, bias=bias)
        return F.linear(x, self.store.decoded, bias)

    def writes(self, arrived: Mapping[str, Tensor], columns: Span, prefix: str) -> Iterator[Write]:
        """What an update writes where; raises before the first write."""
        if self.members[0].row.weight is None:
            whole = [arrived[m.row.parameter][slice(*m.rows), slice(*columns)] for m in self.members]
            yield from self.store.writes(torch.cat(whole), f"{prefix}.weight")
        else:
            parts = [m.bytes_of(arrived, columns) for m in self.members]
            yield from self.store.writes(join_rows(parts, [m.row.name for m in self.members]), prefix)


class ServedLinear:
    """A linear of vLLM's, fused or not.

    Args:
        prefix: vLLM's name of it. runs: what is fused in it, in order. columns: this rank's.
    """

    def __init__(
        self, prefix: str, runs: tuple[Run, ...], columns: Span, site: ServedSite | None, bias: Tensor | None
    ) -> None:  # fmt: skip
        self.prefix, self.runs, self.columns, self.site, self.bias = prefix, runs, columns, site, bias
        self.height = sum(run.height for run in runs)
        self.key = f"{prefix}#{next(_serial)}"
        _served[self.key] = self

    @property
    def members(self) -> tuple[Member, ...]:
        """The published matrices, in order."""
        return tuple(member for run in self.runs for member in run.members)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(self.runs) == 1:
            return self.runs[0].product(x, self.site, bias)
        biases = [None] * len(self.runs) if bias is None else bias.split([run.height for run in self.runs])
        return torch.cat([run.product(x, self.site, b) for run, b in zip(self.runs, biases, strict=True)], -1)

    @property
    def kernel(self) -> str:
        """What multiplies, for the report."""
        held = self.runs[0]
        name = "decoded" if held.store.decoded is not None else f"bytes of {held.members[0].row.weight}"
        return said_of(name, self.site, held.store)

    def writes(self, arrived: Mapping[str, Tensor]) -> Iterator[Write]:
        """What an update writes where; raises before the first write."""
        for run in self.runs:
            yield from run.writes(arrived, self.columns, self.prefix)
        if self.bias is not None:
            biases = [arrived[f"{m.row.name}.bias"][slice(*m.rows)] for m in self.members]
            yield checked(self.bias, torch.cat(biases), f"{self.prefix}.bias")

    def reads(self, arrived: Mapping[str, Tensor]) -> list[str]:
        """Published names that `writes` takes."""
        biases = [f"{m.row.name}.bias" for m in self.members] if self.bias is not None else []
        return [n for m in self.members for n in m.names(arrived)] + biases


def said_of(name: str, site: ServedSite | None, store: Store) -> str:
    """A kernel's name, and whether low-bit activations are multiplied as values: no tensor core takes them."""
    if site is None or (store.encoded is not None and _multiplies_codes(store.encoded, store.dtype, site)):
        return name
    return f"{name}, activations emulated"


def _multiplies_codes(encoded: QuantizedTensor, dtype: torch.dtype, site: ServedSite | None) -> bool:
    probe = torch.empty(1, 1, dtype=dtype, device=encoded.qdata.device)
    return multiplies_codes(probe, site, encoded)


_serial = itertools.count()
_served: weakref.WeakValueDictionary[str, ServedLinear] = weakref.WeakValueDictionary()


def multiply(served: ServedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """`served.product`, opaque to a compiler."""
    return torch.ops.lowbitrl.served_linear(x, bias, served.key, served.height)


@torch.library.custom_op("lowbitrl::served_linear", mutates_args=())
def _served_linear(x: Tensor, bias: Tensor | None, key: str, width: int) -> Tensor:
    return _served[key].product(x, bias)


@_served_linear.register_fake
def _(x, bias, key, width):
    return x.new_empty(*x.shape[:-1], width)


def keeps_decoded(
    device: torch.device, dtype: torch.dtype, encoded: QuantizedTensor | None, site: ServedSite | None
) -> bool:
    """Whether products here need decoded values beside the bytes."""
    if encoded is None or device.type != "cuda" or dtype != torch.bfloat16:
        return True
    return why_not_weight4(encoded) is not None and not _multiplies_codes(encoded, dtype, site)
