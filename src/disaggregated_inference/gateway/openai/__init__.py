"""OpenAI's API: chat completions, completions, responses, models."""
