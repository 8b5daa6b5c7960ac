"""Checks that cross flag groups, by topic; ``megatron/config/run.py`` lists them in order."""
