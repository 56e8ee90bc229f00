"""One query per row over a cache of keys and values, under two sliding windows at once."""
