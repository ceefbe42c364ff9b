"""Programs from Hugging Face configurations, without weights."""
