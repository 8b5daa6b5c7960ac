"""Replays: a microbatch computed twice on one rank and once on another must give equal bits."""
