"""Plans as HTML pages, traces, schedules and notebook views."""
