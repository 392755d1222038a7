"""padfree's training side: a thin FSDP2 trainer whose kernels honour every boundary."""
