"""Features beside the training step: checks of numbers, spikes, faults, slow ranks, nodes.

A feature is a folder. ``flags.py`` has its flags, their check and what follows from numbers alone; the flag groups of
``config`` inherit it, so it imports neither torch nor ``config``. ``listener.py`` has what takes part in a run.

    training/build, training/pretrain        build_listeners lists the listeners in the order of their events
    features/*/listener.py (and others)
    training/loop, checkpoint, core ...
    config                                   OperationConfig inherits the flags
    features/*/flags.py
"""
