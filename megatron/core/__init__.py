"""The model-parallel core: no files, no logging. Groups of ranks, groups of flags and devices are arguments."""
