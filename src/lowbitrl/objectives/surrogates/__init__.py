"""One surrogate a file. Each is a pure function of (B, T) tensors that are 0 outside the mask."""
