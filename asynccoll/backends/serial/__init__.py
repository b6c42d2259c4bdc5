"""A world of one rank: every collective completes immediately."""
