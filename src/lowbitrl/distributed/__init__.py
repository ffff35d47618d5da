"""Several processes that train as one: torchrun starts them, each holds a shard of the learner and samples a share.

ranks.py     who is here, and small things said to all      balance.py  a batch dealt out to ranks
sharding.py  FSDP2 on a prepared learner                    split.py    rollouts shared out
Everything here is the identity in a process that torchrun did not start.
"""
