"""FP8 E4M3: one byte a code, fp32 decode scales. value = code * scale.

    amax over      formats                      scale                                code
    a row          fp8-channel, fp8-token       max(amax / 448, 1 / (448 * 512))     e4m3(x / scale)
    a tensor       fp8-tensor                   max(amax / 448, 1 / (448 * 512))     e4m3(x / scale)
    1 x 128        fp8-1x128                    max(amax, 1e-10) / 448               e4m3(x * (1 / scale))
    128 x 128      fp8-block                    max(amax, 1e-4) / 448                e4m3(x * (1 / scale))

Ties: to even. Zero rows, blocks and tensors: the floor's scale, codes 0. Rows quieter than the floor are
coded coarsely by it.

Matched byte for byte:
    fp8-token, fp8-channel     vLLM 0.33.0 CUDA dynamic per token, and its online per-channel weights
    fp8-1x128                  vLLM 0.33.0 CUDA per-token-group; :deepgemm has DeepGEMM 54e22612's 1e-4 floor
    fp8-block                  DeepGEMM 54e22612 and vLLM's online block weights
    :ue8m0                     DeepGEMM's scales rounded up to powers of two, by exponent bits
    fp8-tensor:vllm            vLLM's CUDA per tensor, static or dynamic: no floor, x * (1 / scale)
    :vllm-native               vLLM's torch.compile and CPU path: x * (1 / scale) per token and tensor
    :compressed-tensors, :torchao, :modelopt   versions 0.20.1, 0.18.0, 0.47.0: amax / 448 in the INPUT dtype

What would break it: x * (1 / scale) for x / scale (4e-4 of the codes), amax / 448 in BF16 (80-100% of the
scales, 2-3% of the codes), exp2(ceil(log2(scale))) for UE8M0 (wrong one ulp above a power of two).

Scale: fp32; (..., 1) per row, () per tensor, (..., K/128), (..., ceil(N/128), K/128).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocked import Blocked, Rule, block_absmax
from .format import QuantizedTensor, alias, register
from .grids import E4M3, E4M3_MAX, quotient

TILE = 128
# vLLM's floor on dynamic per-token scales: a row this quiet would only amplify noise.
TOKEN_FLOOR = 1.0 / (E4M3_MAX * 512.0)
# What each engine divides by when a group is all zero.
DEEPGEMM_FLOOR, VLLM_GROUP_FLOOR = 1e-4, 1e-10


def token_scale(amax: Tensor) -> Tensor:
    """max(amax / 448, 1 / (448 * 512))."""
    return quotient(amax, E4M3_MAX).clamp_(min=TOKEN_FLOOR)


def plain_scale(amax: Tensor) -> Tensor:
    """amax / 448 in the dtype it comes in, 0 for a zero tensor; stored as fp32."""
    return quotient(amax, E4M3_MAX).float()


def deepgemm_scale(amax: Tensor) -> Tensor:
    """max(amax, 1e-4) / 448."""
    return quotient(amax.clamp(min=DEEPGEMM_FLOOR), E4M3_MAX)


def vllm_group_scale(amax: Tensor) -> Tensor:
    """max(amax, 1e-10) / 448."""
    return quotient(amax.clamp(min=VLLM_GROUP_FLOOR), E4M3_MAX)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The least power of two >= a positive normal fp32 scale, by bits: fp32 log2 misses by one ulp."""
    bits = scale.contiguous().view(torch.int32)
    # Any mantissa bit carries into the exponent, then the mantissa goes.
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def divide(x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """x / scale in x's dtype."""
    return x / scale.to(x.dtype)


def multiply(x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """x * (1 / scale); codes of a zero scale are 0."""
    return x * scale.reciprocal().nan_to_num_(nan=float("nan"), posinf=0.0)


def divide_unless_zero(x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """As ``divide``; codes of a zero scale are 0, where the libraries that have no floor write NaN."""
    return divide(x, torch.where(scale == 0, 1.0, scale), b)


def eps_scale(amax: Tensor) -> Tensor:
    """As ``plain_scale``, with the dtype's eps for zeros."""
    scale = plain_scale(amax)
    return torch.where(scale == 0, torch.finfo(amax.dtype).eps, scale)


class Fp8Block(Blocked):
    """FP8 with a scale per 128 x 128 tile. K must be a multiple of 128; the last tile of N may be short."""

    def __init__(self, name: str, rule: Rule):
        super().__init__(name, E4M3, rule, group=TILE)
        self.is_batch_invariant = False

    def check_shape(self, shape, name: str | None = None) -> None:
        """As every format's; besides, a tile needs two dimensions."""
        super().check_shape(shape, name)
        if len(tuple(shape)) < 2:
            raise ValueError(
                f"{name or 'tensor'}: {self.name} scales 128 x 128 tiles and needs two dimensions"
            )

    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, None]:
        b = self._tile_absmax(x, amax)
        (qdata,) = self._map(lambda *rows: (self._codes(*rows),), x, _rows_of(b, x.shape[-2]))
        return qdata, self.rule.scale_of(b), None

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        return self._map(self._fake_rows(x.dtype), x, _rows_of(self._tile_absmax(x, amax), x.shape[-2]))[0]

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * scale of the tile."""
        rows = QuantizedTensor(q.qdata, _rows_of(q.scale, q.shape[-2]), None, q.shape, q.format)
        return super().decode(rows, dtype)

    def _tile_absmax(self, x: Tensor, amax: Tensor | None) -> Tensor:
        n, k = -(-x.shape[-2] // TILE), x.shape[-1] // TILE
        if amax is not None:
            return self._shared_amax(x, amax)[0].expand(*x.shape[:-2], n, k)
        (per_row,) = self._map(lambda rows: (block_absmax(rows, k),), x)
        padded = F.pad(per_row, (0, 0, 0, n * TILE - x.shape[-2]))
        return padded.unflatten(-2, (n, TILE)).amax(-2)


def _rows_of(per_tile: Tensor, n: int) -> Tensor:
    """One value a tile (..., ceil(N/128), G) -> one line of them for each row, (..., N, G)."""
    return per_tile.repeat_interleave(TILE, -2)[..., :n, :]


def _ue8m0(scale_of):
    return lambda amax: round_up_to_power_of_two(scale_of(amax))


FLOORED = Rule(token_scale, divide)
VLLM_NATIVE = Rule(token_scale, multiply)
DEEPGEMM = Rule(deepgemm_scale, multiply)
DEEPGEMM_UE8M0 = Rule(_ue8m0(deepgemm_scale), multiply)
# + 0: compressed-tensors adds a zero point, which costs a -0 its sign (a small negative keeps it).
CT = Rule(eps_scale, lambda x, scale, b: divide(x, scale, b) + 0.0, native=True)
MODELOPT = Rule(plain_scale, divide_unless_zero, native=True)
# torchao takes amax / 448 in the input's dtype but divides in fp32.
TORCHAO = Rule(plain_scale, lambda x, scale, b: divide_unless_zero(x.float(), scale, b), native=True)


def _family(name: str, rules: dict[str, Rule], **kwargs) -> None:
    register(*(Blocked(name + suffix, E4M3, rule, **kwargs) for suffix, rule in rules.items()))


ROW_RULES = {"": FLOORED, ":vllm-native": VLLM_NATIVE, ":compressed-tensors": CT, ":torchao": TORCHAO}
_family("fp8-token", ROW_RULES)
_family("fp8-channel", ROW_RULES)
_family(
    "fp8-tensor",
    {
        "": FLOORED,
        ":vllm": Rule(plain_scale, multiply),
        ":vllm-native": VLLM_NATIVE,
        ":compressed-tensors": CT,
        ":modelopt": MODELOPT,
    },
    per="tensor",
)
_family(
    "fp8-1x128",
    {
        "": Rule(vllm_group_scale, multiply),
        ":deepgemm": DEEPGEMM,
        ":ue8m0": DEEPGEMM_UE8M0,
        ":vllm-ue8m0": Rule(_ue8m0(vllm_group_scale), multiply),
        ":vllm-native": FLOORED,
        ":vllm-native-ue8m0": Rule(_ue8m0(token_scale), divide),
    },
    group=TILE,
    scale_bits=32,
)
register(
    Fp8Block("fp8-block", DEEPGEMM),
    Fp8Block("fp8-block:ue8m0", DEEPGEMM_UE8M0),
    Fp8Block("fp8-block:compressed-tensors", CT),
    Fp8Block("fp8-block:torchao", TORCHAO),
)
alias("fp8-token:vllm", "fp8-token")
alias("fp8-channel:vllm", "fp8-channel")
alias("fp8-1x128:vllm", "fp8-1x128")
alias("fp8-block:deepgemm", "fp8-block")
alias("fp8-block:vllm", "fp8-block")
