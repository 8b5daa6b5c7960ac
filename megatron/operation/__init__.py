"""The processes of a run: start, rendezvous, exit codes and restarts."""
