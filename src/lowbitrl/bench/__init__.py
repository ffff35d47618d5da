"""How fast the library is, next to what the hardware could do: ``lowbitrl bench kernels|rollout|step|sync``."""
