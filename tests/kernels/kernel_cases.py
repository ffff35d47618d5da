"""Data that finds differences between a kernel and its reference, and how to report one."""

import torch


def awkward(rows, width, dtype=torch.bfloat16, device="cpu", seed=0):
    """Rows of ordinary data among zeros, subnormals, huge values, exact ties and repeated columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * (1 + 3 * torch.rand(width, generator=generator))
    if width >= 64:
        x[:, width // 2 : width // 2 + 16] = x[:, :16]
    for row, fill in enumerate(_fills(width, generator)):
        if row + 1 < rows:
            x[row + 1] = fill
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).to(device)


def _fills(width, generator):
    noise = torch.randn(width, generator=generator)
    yield torch.zeros(width)
    yield noise * 1e-38
    yield noise * 1e30
    yield torch.randint(-12, 13, (width,), generator=generator) * 0.25  # midpoints of E2M1 at scale 1
    yield torch.randint(-448, 449, (width,), generator=generator).float()
    yield torch.where(torch.rand(width, generator=generator) < 0.1, noise * 3e4, noise * 1e-3)
    yield -torch.zeros(width)
    yield torch.full((width,), 6.0)


def differences(got, wanted):
    """ "3/4096 bytes differ, first at 17", or an empty string."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype, f"dtype {got.dtype}, wanted {wanted.dtype}"
    a, b = (t.detach().cpu().reshape(-1).contiguous() for t in (got, wanted))
    if not a.numel():
        return ""
    unlike = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.numel(), -1).any(1)
    if not unlike.any():
        return ""
    first = int(unlike.nonzero()[0])
    return f"{int(unlike.sum())}/{a.numel()} differ, first at {first}: {a[first]} for {b[first]}"
