"""The planner's answer: plans and specs, with their file format."""
