"""What a bash script starts, without running it."""
