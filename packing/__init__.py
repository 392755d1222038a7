"""padfree's data side: chat files become packed, masked buffers that carry their boundaries."""
