"""Pipeline parallelism: schedules as data, their verifier and simulator, and one executor that runs any of them.

P *stages* are the ranks of a pipeline; each holds V *chunks* of the model. The P x V chunks in the order of the
layers are the *virtual stages*.
"""
