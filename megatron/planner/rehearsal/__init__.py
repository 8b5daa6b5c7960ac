"""A unit of the model, rehearsed once for each way to run it: its memory and its launches."""
