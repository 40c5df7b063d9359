"""`disagg chaos`: a cluster under random faults, and a check of every answer."""
