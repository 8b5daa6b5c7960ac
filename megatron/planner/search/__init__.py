"""Search of the fastest layout of a training run that fits in memory."""
