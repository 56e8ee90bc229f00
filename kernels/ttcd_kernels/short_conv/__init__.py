"""Two depthwise convolutions inside chunks, their difference, and the student's one as a key."""
