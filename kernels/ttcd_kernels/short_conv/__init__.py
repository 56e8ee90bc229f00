"""Two depthwise convolutions inside chunks, their difference, and the student's as a key."""
