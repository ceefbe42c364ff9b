"""Plan, judge, learn, plan again."""
