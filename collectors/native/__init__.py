"""What is compiled on the user's machine and loaded into a rank: the collectives hook and the NCCL plugin."""
