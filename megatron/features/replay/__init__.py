"""The same microbatch twice on one rank, and once on another rank, must give the same bits."""
