"""verl as the trainer of a cluster: our losses, learner arithmetic, published bytes and rollouts inside it.

Importing this package imports no verl. `plugin` is what verl itself imports, through the entry point
`verl.plugins`, in every process that imports verl. See docs/verl.md.
"""
