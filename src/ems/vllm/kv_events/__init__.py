"""What others hear of blocks that the pool stores and removes."""
