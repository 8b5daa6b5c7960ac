"""Pipeline schedules as data, without torch: the split of the layers into stages, the schedules, their verifier and
simulator. One executor (``core/pipeline_parallel.py``) runs any of them.

P *stages* are the ranks of a pipeline; each holds V *chunks* of the model. The P x V chunks in the order of the
layers are the *virtual stages*.
"""
