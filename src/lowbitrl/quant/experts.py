"""Mixtures of experts that wear a plan, through transformers' public `ExpertsInterface`.

    x^  = A13(x)                       once, before routing: one choice of residual channels a layer
    h_e = act(x^ Wg_e^T) * (x^ Wu_e^T)    for the tokens of expert e
    y   = sum_e p_e * A2(h_e) Wd_e^T      products of the dtype of the router's weights

Three ways to multiply, named after transformers' own and taken from what the model was set to:
"eager" decodes one expert at a time and multiplies its tokens; "grouped_mm" decodes the experts that
have tokens, one layer's at a time; "batched_mm" gathers a matrix a token. Learner and rollout run the
same code, so the same bytes and input give the same bits on both sides. Bytes are decoded for each
product and again for its gradient: no side keeps a decoded copy, unless a rollout is asked to.

A rollout prepared with `kernels="low-bit"` reads the bytes in one launch instead (`grouped_w4a16_matmul`, BF16
on CUDA): no decoding, no host synchronization, and a global scale on the sums where the learner's weights are
rounded after it; `quant.products` bounds the difference.

Notation: T tokens, k experts a token, S = T * k rows sorted by expert, U experts that have tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels.between_experts import gate_rows, weighted_sum
from lowbitrl.kernels.decode import decode
from lowbitrl.kernels.grouped_w4a16 import ExpertBlocks, align_experts, grouped_w4a16_matmul
from lowbitrl.kernels.grouped_w8a8 import grouped_w8a8_matmul
from lowbitrl.kernels.weights4 import why_not_weight4
from lowbitrl.quant.groups import version_key
from lowbitrl.quant.linear import CODE_PAIRS, CODES_CHECKED_ON, in_place
from lowbitrl.quant.plan import LayerPlan
from lowbitrl.quant.shards import whole
from lowbitrl.quant.sites import ActivationSite, straight_through
from lowbitrl.quant.stacks import StackLayout, encode_stack, present, select, to_canonical

Dispatch = Literal["eager", "grouped_mm", "batched_mm"]
DISPATCHES: tuple[str, ...] = get_args(Dispatch)
PREFIX = "lowbitrl:"
# torch's and transformers' classes of the same function.
SILU = {"SiLU", "SiLUActivation"}


class StackWeights:
    """A stack's weights on either side: its parameter, and the bytes that stand for it.

    Args:
        row: the plan's decision. module: the experts module that owns the parameter.
        frozen: rollout side: bytes come through `adopt`, and the parameter is emptied.
        keep_decoded: frozen only: hold the decoded stack too, at BF16's memory, and decode no more.

    Attributes:
        device / keeps: as in `WeightGroup`.
    """

    device: torch.device | None = None
    keeps: bool = True

    def __init__(
        self, row: LayerPlan, layout: StackLayout, module: nn.Module, frozen: bool, keep_decoded: bool = False
    ) -> None:
        self.row, self.layout, self.frozen, self.keep_decoded = row, layout, frozen, keep_decoded
        self.names = self.parameters = (row.name,)
        self.leaf = row.name.rpartition(".")[2]
        self.dtype = self.parameter_of(module).dtype
        self._module = module
        self._bytes: QuantizedTensor | None = None
        self._key: tuple[Any, ...] = ()
        self._decoded: Tensor | None = None

    def parameter_of(self, module: nn.Module) -> nn.Parameter:
        """The stack's parameter."""
        return getattr(module, self.leaf)

    @property
    def parameter(self) -> nn.Parameter:
        """The trainable stack; empty where bytes took its place."""
        return self.parameter_of(self._module)

    def encoded(self) -> dict[str, QuantizedTensor]:
        """Bytes by stack name, encoded anew only if the parameter has changed; frozen ones as adopted."""
        if self.frozen:
            return {self.row.name: self._bytes} if self._bytes is not None else {}
        weight = self.parameter
        key = version_key([weight], self.device)
        if self._bytes is None or key != self._key:
            bytes_ = self._encode(whole(weight, self.dtype, self.device))
            if not self.keeps:
                return {self.row.name: bytes_}
            self._bytes, self._key = bytes_, key
        return {self.row.name: self._bytes}

    def _encode(self, weight: Tensor) -> QuantizedTensor:
        assert self.row.weight is not None
        return encode_stack(to_canonical(weight, self.layout), get_format(self.row.weight), self.row.name)

    def invalidate(self) -> None:
        """Let the cached bytes of a trainable stack go."""
        if not self.frozen:
            self._bytes, self._key = None, ()

    def freeze(self) -> None:
        """Encode what the parameter holds, once, and let it go."""
        self.adopt(self._encode(self.parameter.detach()))

    def adopt(self, encoded: QuantizedTensor) -> None:
        """Serve these bytes from now on."""
        self._bytes = in_place(self._bytes, encoded)
        self._decoded = present(decode(encoded, self.dtype), self.layout) if self.keep_decoded else None
        # Of size 0 rather than zeros: whoever multiplies by it past this module fails at once.
        self.parameter.data = torch.empty(0, 0, 0, dtype=self.dtype, device=encoded.qdata.device)

    def source(self, aligned: bool) -> Source:
        """What a product multiplies by: the bytes, or, not aligned, the parameter itself."""
        stored = self.encoded()[self.row.name] if aligned else None
        return Source(stored, self._decoded if aligned else None, self.layout, self.row.shape, self.dtype)


@dataclass(frozen=True)
class Source:
    """Presented weights of chosen experts on demand."""

    stored: QuantizedTensor | None
    decoded: Tensor | None
    layout: StackLayout
    shape: tuple[int, ...]
    dtype: torch.dtype

    def values(self, parameter: Tensor, experts: int | Tensor) -> Tensor:
        """(N, K) of one expert or (U, N, K) of several, in the compute dtype."""
        if self.decoded is not None:
            return self.decoded[experts]
        if self.stored is not None:
            return present(decode(select(self.stored, experts), self.dtype), self.layout)
        weight = parameter[experts]
        return weight.transpose(-1, -2) if self.layout.transposed else weight


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert.

    Attributes:
        order: (S,) index into the T * k (token, choice) pairs. expert: (S,) of each row.
        active: (U,) experts with tokens, ascending. ends: (U,) int32, where each one's rows end.
        spans: (expert, first row, past its last row) of each, on the host.
    """

    order: Tensor
    expert: Tensor
    active: Tensor
    ends: Tensor
    spans: tuple[tuple[int, int, int], ...]
    dispatch: str

    @classmethod
    def of(cls, top_k_index: Tensor, dispatch: str) -> Groups:
        """Sort (T, k) choices; within an expert the tokens keep their order."""
        expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
        active, counts = torch.unique_consecutive(expert, return_counts=True)
        ends = counts.cumsum(0)
        stops = ends.tolist()
        spans = tuple(zip(active.tolist(), [0, *stops[:-1]], stops, strict=True)) if stops else ()
        return cls(order, expert, active, ends.int(), spans, dispatch)


class _GroupedProduct(torch.autograd.Function):
    """y_s = W^_e x_s for the rows s of each expert e; dL/dx with the quantized weight, dL/dW := dL/dW^.

    Backward decodes again: what is kept for it are the input and, by reference, the bytes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, source: Source, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, parameter)
        ctx.source, ctx.groups = source, groups
        return _multiply(x, parameter, source, groups, transpose=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad, (x, parameter) = grads[0].contiguous(), ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(grad, parameter, ctx.source, ctx.groups, transpose=True)
        if ctx.needs_input_grad[1]:
            grad_w = torch.zeros_like(parameter)
            for expert, first, stop in ctx.groups.spans:
                pair = (x, grad) if ctx.source.layout.transposed else (grad, x)
                grad_w[expert] = pair[0][first:stop].T @ pair[1][first:stop]
        return grad_x, grad_w, None, None


def _multiply(x: Tensor, parameter: Tensor, source: Source, groups: Groups, transpose: bool) -> Tensor:
    """Rows (S, K) by their experts' (N, K), or, transposed, rows (S, N) back to (S, K)."""
    if not groups.spans:
        return x.new_zeros(0, source.shape[-1 if transpose else -2])
    if groups.dispatch == "eager":
        return torch.cat(
            [
                _by_one(x[first:stop], source.values(parameter, e), transpose)
                for e, first, stop in groups.spans
            ]
        )
    weights = source.values(parameter, groups.active)
    if groups.dispatch == "grouped_mm":
        return F.grouped_mm(x, weights if transpose else weights.transpose(-1, -2), offs=groups.ends)
    per_row = weights[torch.searchsorted(groups.active, groups.expert)]
    if transpose:
        return torch.bmm(x.unsqueeze(1), per_row).squeeze(1)
    return torch.bmm(per_row, x.unsqueeze(-1)).squeeze(-1)


def _by_one(rows: Tensor, weight: Tensor, transpose: bool) -> Tensor:
    return rows @ weight if transpose else F.linear(rows, weight)


@dataclass
class Projection:
    """One of the two products of an experts module: what happens to its input, what it multiplies by."""

    weights: StackWeights
    aligned: bool
    site: ActivationSite | None

    def stored(self) -> QuantizedTensor:
        """The bytes served, canonical."""
        return self.weights.encoded()[self.weights.row.name]

    def why_not_bytes(self) -> str | None:
        """Why no kernel can multiply by the bytes as they lie, or None."""
        held = self.weights
        if not self.aligned or not held.frozen:
            return "its weights are no frozen bytes"
        if held.layout.interleaved:
            return "gate and up are interleaved"
        return None if self.takes_codes() else why_not_weight4(self.stored())

    def takes_codes(self) -> bool:
        """Whether the input's 8-bit codes are multiplied, rather than values."""
        return self.site is not None and (self.site.format.name, self.stored().format) in CODE_PAIRS

    def from_bytes(self, module: nn.Module, rows: Tensor, blocks: ExpertBlocks, *, routed: bool) -> Tensor:
        """(R, K) -> (S, N), bias included; rows are tokens or, after routing, (token, choice) pairs."""
        bias = getattr(module, f"{self.weights.leaf}_bias", None)
        if self.site is None:
            return grouped_w4a16_matmul(rows, self.stored(), blocks, bias=bias)
        if self.takes_codes():
            return grouped_w8a8_matmul(self.site.codes(rows), self.stored(), blocks, bias=bias)
        # Routed rows are no longer one a token: nothing of the token mask covers them.
        x = self.site.quantized(rows, None) if routed else self.site(rows)
        return grouped_w4a16_matmul(rows if x is None else x, self.stored(), blocks, bias=bias)

    def __call__(self, module: nn.Module, rows: Tensor, groups: Groups) -> Tensor:
        """(S, K) -> (S, N), bias included."""
        parameter = self.weights.parameter_of(module)
        out = _GroupedProduct.apply(rows, parameter, self.weights.source(self.aligned), groups)
        bias = getattr(module, f"{self.weights.leaf}_bias", None)
        return out if bias is None else out + bias[groups.expert]


@dataclass
class WornExperts:
    """What `wear_experts` leaves on an experts module, under `module.lowbitrl_experts`."""

    w13: Projection
    w2: Projection
    low_bit: bool = False

    def forward(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, dispatch: str
    ) -> Tensor:
        """(T, H), (T, k), (T, k) -> (T, H)."""
        if self.multiplies_bytes(hidden):
            return self.forward_bytes(module, hidden, top_k_index, top_k_weights)
        groups = Groups.of(top_k_index, dispatch)
        token = groups.order // top_k_index.shape[-1]
        x = hidden if self.w13.site is None else self.w13.site(hidden)
        up = self.w13(module, x[token], groups)
        h = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        if self.w2.site is not None:
            h = quantize_rows(self.w2.site, h, _rows(self.w2.site._real(hidden), token), groups)
        y = self.w2(module, h, groups)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        weighted = y * top_k_weights.reshape(-1)[groups.order].unsqueeze(-1)
        in_order = weighted[torch.argsort(groups.order)]
        return in_order.view(*top_k_index.shape, hidden.shape[-1]).sum(1).to(hidden.dtype)

    def multiplies_bytes(self, hidden: Tensor) -> bool:
        """Whether bytes are read as they are: asked for, and BF16 tokens on a GPU without gradient."""
        if not self.low_bit or not hidden.is_cuda or hidden.dtype != torch.bfloat16:
            return False
        # A maximum observed over real tokens needs more than rows.
        observing = self.w2.site is not None and self.w2.site.tokens.observing
        return not torch.is_grad_enabled() and not observing and self.why_not_bytes() is None

    def why_not_bytes(self) -> str | None:
        """Why no kernel can multiply by both stacks' bytes, or None."""
        second = self.w2.site
        if second is not None and second.residual and second.scope == "batch":
            return "W2's residual is chosen expert by expert"
        if CODES_CHECKED_ON is None and (self.w13.takes_codes() or self.w2.takes_codes()):
            return "8-bit products have been checked on no GPU yet"
        return self.w13.why_not_bytes() or self.w2.why_not_bytes()

    def forward_bytes(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """`forward` from the bytes, rows in (token, choice) order, without host synchronization."""
        blocks = align_experts(top_k_index, self.w13.stored())
        up = self.w13.from_bytes(module, hidden, blocks, routed=False)
        if gates_with_silu(module):
            h = gate_rows(up)
        else:
            h = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        y = self.w2.from_bytes(module, h, blocks, routed=True)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        return weighted_sum(y, top_k_weights).to(hidden.dtype)


def gates_with_silu(module: Any) -> bool:
    """Whether rows are gated as transformers does by default, silu(first half) * second half."""
    gate = getattr(type(module), "_apply_gate", None)
    default = gate is not None and gate.__name__ == "_default_apply_gate"
    return default and bool(module.has_gate) and type(module.act_fn).__name__ in SILU


def quantize_rows(site: ActivationSite, h: Tensor, real: Tensor | None, groups: Groups) -> Tensor:
    """The input of W2, (S, I): a batch-wide residual chooses its channels expert by expert.

    Channel j of one expert has nothing to do with channel j of another, so they are not pooled.
    """
    with torch.no_grad():
        if site.residual and site.scope == "batch" and groups.spans:
            spans = [slice(first, stop) for _, first, stop in groups.spans]
            parts = [site.quantized(h[s], _rows(real, s)) for s in spans]
            quantized = torch.cat([p for p in parts if p is not None]) if parts[0] is not None else None
        else:
            quantized = site.quantized(h, real)
    return h if quantized is None else straight_through(h, quantized)


def _rows(mask: Tensor | None, index: Tensor | slice) -> Tensor | None:
    return None if mask is None else mask.reshape(-1)[index]


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, dispatch: str
) -> Tensor:
    """What the experts interface calls: a worn module's forward, or transformers' own for any other."""
    worn = module.__dict__.get("lowbitrl_experts")
    if worn is not None:
        return worn.forward(module, hidden_states, top_k_index, top_k_weights, dispatch)
    if dispatch == "eager":
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    return ALL_EXPERTS_FUNCTIONS[dispatch](module, hidden_states, top_k_index, top_k_weights)


def select_dispatch(modules: list[Any]) -> str:
    """Point experts modules at `experts_forward`, keeping the way to multiply they were set to.

    Raises:
        ValueError: a way that has no counterpart here, or experts spread over devices.
    """
    config = modules[0].config
    dispatch = (config._experts_implementation or "eager").removeprefix(PREFIX)
    if dispatch not in DISPATCHES:
        raise ValueError(
            f"experts_implementation={dispatch!r} multiplies in a kernel that takes no low-bit weights; load the "
            f"model with experts_implementation= one of {', '.join(DISPATCHES)}"
        )
    if any(getattr(module, "_is_expert_parallel", False) for module in modules):
        raise ValueError("the experts are spread over devices; prepare a model that holds all of them")
    for name in DISPATCHES:
        ExpertsInterface.register(PREFIX + name, partial(experts_forward, dispatch=name))
    for module in modules:
        # Not model.set_experts_implementation: that of transformers 5.5 takes its own names only.
        module.config._experts_implementation = PREFIX + dispatch
    return dispatch
