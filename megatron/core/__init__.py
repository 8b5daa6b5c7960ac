"""The model-parallel core: no flags, no files, no logging. Groups, configs and devices are arguments."""
