"""What a person watches: the line a second of `engramd stats --interval` and the screen of `engramd top`."""
