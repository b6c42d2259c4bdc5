"""A world of one rank: every collective is over at once."""
