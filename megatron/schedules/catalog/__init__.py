"""One module per schedule: its order of actions, and ``SCHEDULE``, which describes it."""
