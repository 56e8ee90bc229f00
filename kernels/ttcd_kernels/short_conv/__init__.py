"""What a chunk's error and key start from: two depthwise convolutions inside chunks, their
difference, and the student's one as a key."""
