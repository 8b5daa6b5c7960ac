"""Building a run from its flags."""
